"""Measure the required shortlist length on a trained run's queries and keys.

    python -m lab.benchmarks.shortlists --run=WORKDIR [--domain=arxiv] [--blocks=4] [--groups=32] [--seq_len=102400]

Top-1 Chunk selects the past chunk with the largest attention mass ("exact") or with the best key ("best_key"). A
shortlist ranks chunks with a table of a few numbers per chunk, and scores only the keys in the first m chunks. For each
layer and head in a Top-1 Chunk or Transformer++ run, on held-out text, the script measures recall: how often the target
chunk is among the first m. The tables estimate the scores s = scale q . k in a chunk from

    mean            the mean key
    2, 4, 8 means   the largest mean among 2, 4, 8 parts of the chunk
    mean, variance  the mean plus half the variance of s, from the variance of each key channel
    mean, leading   the same, from the leading eigenvalue and eigenvector of the key covariance

In selection="shortlist", the mean, 8 means and mean-with-leading-eigenvector tables are `mean`, `sub_means` and
`mean_eigen` (kernels_pallas/select_chunk/tables.py).

An `own` list belongs to one query. A `shared` list belongs to 64 neighbouring queries (or a whole shorter chunk), so
that a kernel reads its keys once; it ranks chunks by their share in the table's softmax over these queries. Recall
counts queries with more than m past chunks. The script also reports the mass read by exact and best key as a fraction
of all past mass, and the gaps between the best two chunks. It prints Markdown tables, and writes a report and a picture
to runs/benchmarks/shortlists.json, or --json.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__)
FLAGS.add_argument("--run", required=True, help="a workdir with a checkpoint")
FLAGS.add_argument("--domain", default="arxiv", help="domain of the text (arxiv)")
FLAGS.add_argument("--blocks", type=int, default=4, help="sequences (4)")
FLAGS.add_argument("--groups", type=int, default=32, help="groups of 64 queries of each sequence, evenly spread (32)")
FLAGS.add_argument("--seq_len", type=int, default=0, help="tokens of a sequence; that of the run by default")
FLAGS.add_argument("--chunk_size", type=int, default=128, help="keys of a chunk (128)")
options.parse_early(FLAGS, __name__)

import contextlib
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import kernels_pallas
from benchmarks.harness import plot, report
from benchmarks.harness.machine import machine
from kernels_pallas.select_chunk.tables import rows, run_means, score
from seqjax.command_line import run_command
from seqjax.data import open_corpus
from seqjax.errors import UserError
from seqjax.training.evaluate import restore
from seqjax.types import Array

GROUP = 64  # maximum number of neighbouring queries per group; all are in one chunk
SIZES = (1, 2, 4, 8, 16, 32, 64)  # shortlist lengths
TARGETS = ("exact", "best_key")
OPS = ("top1_chunk_attention", "causal_attention")


def tables(q_QHK: Array, k_cCHK: Array, scale: float) -> dict[str, Array]:
    """Return {table name: estimates [Q, H, c]} for all chunks: log of the largest or the mean exponential, in nats."""
    k_cHCK = k_cCHK.swapaxes(1, 2)

    def estimate(row_cHPK: Array, table: str) -> Array:
        return score(scale * jnp.einsum("qhk,chpk->qhcp", q_QHK, row_cHPK), table)

    estimates = {"mean": estimate(rows(k_cHCK, "mean"), "mean")}
    for parts in (2, 4, 8):
        estimates[f"{parts} means"] = estimate(run_means(k_cHCK, parts), "sub_means")
    half_variance_QHc = 0.5 * scale**2 * jnp.einsum("qhk,chk->qhc", q_QHK**2, k_cHCK.var(2))
    estimates["mean, variance"] = estimates["mean"] + half_variance_QHc
    estimates["mean, leading"] = estimate(rows(k_cHCK, "mean_eigen"), "mean_eigen")
    return estimates


def rank(score_c: Array, target: Array) -> Array:
    """Return how many chunks precede `target` along the last axis, by score and then by index."""
    at = jnp.take_along_axis(score_c, target[..., None], -1)
    is_before = (score_c > at) | ((score_c == at) & (jnp.arange(score_c.shape[-1]) < target[..., None]))
    return is_before.sum(-1)


@partial(jax.jit, static_argnames="chunk_size")
def of_group(q_QHK: Array, k_cCHK: Array, first: Array, *, chunk_size: int) -> dict[str, Any]:
    """Return the measurements for the group of queries that starts at position `first`, each [Q, H]."""
    scale = q_QHK.shape[-1] ** -0.5
    is_past_c = jnp.arange(k_cCHK.shape[0]) < first // chunk_size  # a group lies in one chunk
    scores_QHcC = scale * jnp.einsum("qhk,cshk->qhcs", q_QHK, k_cCHK)
    of_chunk = {"exact": jax.nn.logsumexp(scores_QHcC, -1), "best_key": scores_QHcC.max(-1)}
    of_chunk = {name: jnp.where(is_past_c, x, -jnp.inf) for name, x in of_chunk.items()}
    log_share_QHc = jax.nn.log_softmax(of_chunk["exact"], -1)
    measured: dict[str, Any] = {"past": jnp.broadcast_to(first // chunk_size, q_QHK.shape[:2])}
    chosen = {name: x.argmax(-1) for name, x in of_chunk.items()}
    for name, x in of_chunk.items():
        best, second = jnp.moveaxis(jax.lax.top_k(x, 2)[0], -1, 0)
        measured[f"gap/{name}"] = best - second
        measured[f"share/{name}"] = jnp.exp(jnp.take_along_axis(log_share_QHc, chosen[name][..., None], -1)[..., 0])
    for name, table in tables(q_QHK, k_cCHK, scale).items():
        own_QHc = jnp.where(is_past_c, table, -jnp.inf)
        shared_Hc = jax.nn.log_softmax(own_QHc, -1).max(0)
        lists = {"own": own_QHc, "shared": jnp.broadcast_to(shared_Hc, own_QHc.shape)}
        for target, kind in ((t, k) for t in TARGETS for k in lists):
            measured[f"rank/{target}/{kind}/{name}"] = rank(lists[kind], chosen[target])
    return measured


def operands(run: str, domain: str, *, blocks: int, seq_len: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return queries [T, H, K] and keys [T, G, K] of each attention layer, by sequence and layer."""
    config, model, params, _, _ = restore(run)
    params = jax.device_put(params, jax.devices()[0])  # callbacks are ordered only on a single device
    length = seq_len or config.train.seq_len
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    if domain not in corpus.eval_domains:
        raise UserError(f"--domain={domain}: {run} is evaluated on {', '.join(corpus.eval_domains)}.")
    each = -(-length // config.train.seq_len)
    tokens = corpus.eval_blocks(domain, count=blocks * each).tokens[:, :-1]
    sequences: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def note(q: np.ndarray, k: np.ndarray) -> None:
        sequences[-1].append((np.asarray(q, np.float32), np.asarray(k, np.float32)))

    def noted(op):
        def call(q: Array, k: Array, v: Array, **settings) -> Array:
            jax.debug.callback(note, q[0], k[0], ordered=True)
            return op(q, k, v, **settings)

        return call

    with contextlib.ExitStack() as patches:
        for name in OPS:
            op = noted(getattr(kernels_pallas, name))
            patches.enter_context(mock.patch.object(kernels_pallas, name, op))
        for at in range(min(blocks, len(tokens) // each)):
            sequences.append([])
            model.hidden(params, jnp.asarray(tokens[at * each : (at + 1) * each].reshape(1, -1)[:, :length]))
            jax.effects_barrier()
    if not sequences or not sequences[0]:
        raise UserError(f"--run={run}: it has no layer of Top-1 Chunk or attention, or less text than --seq_len.")
    return sequences


def measure(q: np.ndarray, k: np.ndarray, *, groups: int, chunk_size: int) -> dict[str, np.ndarray]:
    """Return `of_group` for evenly spaced groups in one layer and sequence, [n, Q, H]."""
    n_chunks = len(q) // chunk_size
    size = min(GROUP, chunk_size)
    starts = np.arange(2 * chunk_size, len(q) - size + 1, size)
    starts = starts[np.unique(np.linspace(0, len(starts) - 1, min(groups, len(starts))).round().astype(int))]
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1).astype(np.float32)
    k_cCHK = jnp.asarray(k[: n_chunks * chunk_size].reshape(n_chunks, chunk_size, *k.shape[1:]))
    of_groups = [
        of_group(jnp.asarray(q[at : at + size], jnp.float32), k_cCHK, jnp.asarray(at), chunk_size=chunk_size)
        for at in starts
    ]
    return {key: np.stack([np.asarray(one[key]) for one in of_groups]) for key in of_groups[0]}


def summary(measured: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Return recall by target, kind and table, mean mass fractions, and gap quantiles."""
    joined = {key: np.concatenate([one[key].ravel() for one in measured]) for key in measured[0]}
    past, recall = joined["past"], {}
    for key, ranks in joined.items():
        if key.startswith("rank/"):
            sizes = [m for m in SIZES if (past > m).any()]
            recall[key.removeprefix("rank/")] = {str(m): float((ranks[past > m] < m).mean()) for m in sizes}
    return {
        "recall": recall,
        "share": {name: float(joined[f"share/{name}"].mean()) for name in TARGETS},
        "gap_quantiles": {
            name: [float(x) for x in np.quantile(joined[f"gap/{name}"], (0.1, 0.5, 0.9))] for name in TARGETS
        },
        "chunks": int(past.max()),
        "queries": past.size,
    }


def markdown(result: dict[str, Any], target: str, kind: str) -> str:
    """Return recall as Markdown: one row per table, one column per shortlist length."""
    rows = {key.split("/")[2]: row for key, row in result["recall"].items() if key.startswith(f"{target}/{kind}/")}
    sizes = list(next(iter(rows.values())))
    cells = [[name, *(f"{100 * row[m]:.1f}" for m in sizes)] for name, row in rows.items()]
    return report.markdown([f"{target}, {kind} list: % found among", *sizes], cells)


def draw(result: dict[str, Any], path: Path, title: str) -> None:
    """Draw best-key recall over the shortlist length, with one panel for own and one for shared lists."""
    made, panels = plot.figure(8, 3.6, panels=2)
    for axes, kind in zip(panels, ("own", "shared"), strict=True):
        of_kind = {key: row for key, row in result["recall"].items() if key.startswith(f"best_key/{kind}/")}
        for (key, row), color in zip(of_kind.items(), plot.COLORS, strict=False):
            sizes, values = [int(m) for m in row], [100 * v for v in row.values()]
            axes.plot(sizes, values, color=color, marker="o", markersize=3.5, linewidth=1.4, label=key.split("/")[2])
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(m) for m in sizes])
        axes.set_xlabel(f"chunks of a list {'of its own' if kind == 'own' else f'shared by {GROUP} queries'}")
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("best key's chunk is listed, % of queries")
    made.suptitle(title, fontsize=9.5, x=0.01, ha="left")
    panels[0].legend(frameon=False, fontsize=8.5)
    plot.save(made, path)


def main(argv: list[str]) -> None:
    """Measure, print and draw."""
    args = FLAGS.parse_args(argv)
    if args.chunk_size % min(GROUP, args.chunk_size):
        raise UserError(f"--chunk_size={args.chunk_size}: choose at most {GROUP} or a multiple of it.")
    layers: list[list[dict[str, np.ndarray]]] = []
    for sequence in operands(args.run, args.domain, blocks=args.blocks, seq_len=args.seq_len):
        layers = layers or [[] for _ in sequence]
        for of_layer, (q, k) in zip(layers, sequence, strict=True):
            of_layer.append(measure(q, k, groups=args.groups, chunk_size=args.chunk_size))
    result = summary([one for of_layer in layers for one in of_layer])
    by_layer = [summary(of_layer) for of_layer in layers]
    for target in TARGETS:
        print(markdown(result, target, "own"), markdown(result, target, "shared"), sep="\n\n", end="\n\n")
    print("Share of the past mass that is read:", {name: round(x, 3) for name, x in result["share"].items()})
    out = Path(args.json or options.UNRECORDED / "shortlists.json")
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report.save(out, {"machine": machine(), "settings": settings, "results": result, "layers": by_layer})
    run = Path(args.run).name.replace("_", " ")
    draw(result, out.with_suffix(".png"), f"{run}, {args.domain}: {result['chunks']} past chunks")
    print(f"Wrote {out}.")


if __name__ == "__main__":
    run_command(main)
