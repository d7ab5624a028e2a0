"""The loss per domain: `seqjax evaluate --workdir=DIR` evaluates the newest checkpoint of a run.

With --entropy it also reports the entropy of the attention weights: E_i = lse_i - sum_j p_ij s_ij in nats, and
E_i / ln(i + 1), as means over layers, heads, positions i >= 1 and sequences (arXiv 2505.18522, section 3).
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from seqjax import store, urls
from seqjax.arguments import command_parser, words
from seqjax.config import Config
from seqjax.data import Corpus, EvalBlocks, open_corpus, open_test_sets
from seqjax.errors import UserError, run_command
from seqjax.files import as_json, write_json
from seqjax.models import Model
from seqjax.models.entropy import require_entropy
from seqjax.sharding import batch_sharding, make_mesh, replicated, shardings
from seqjax.training import workdir as workdirs
from seqjax.training.batches import eval_batch_size
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.segments import trained
from seqjax.training.step import make_entropy_step, make_eval_step
from seqjax.types import Params

ENTROPY_TOKENS = 1_048_576  # per domain, if neither the config nor --tokens sets a number


class Domain(NamedTuple):
    """The evaluation blocks of one domain, on the host, in batches of which the last is padded."""

    blocks: EvalBlocks
    tokens: list[np.ndarray]  # int32 [B, T+1]
    weights: list[np.ndarray]  # float32 [B]; 0 for padding


def load_domains(corpus: Corpus, config: Config, *, mesh: Mesh, tokens: int = 0) -> dict[str, Domain]:
    """Return the batches of every evaluation domain, in the corpus's order (in-domain first), always the same ones.

    `tokens` is the largest number of tokens per domain; 0 means `config.eval.tokens`.
    """
    batch_size = eval_batch_size(config.eval.batch_size, config.train, mesh)
    domains = {}
    for name in corpus.eval_domains:
        count = max(1, (tokens or config.eval.tokens) // corpus.seq_len)
        blocks = corpus.eval_blocks(name, count=count, seed=config.eval.seed)
        rows = blocks.tokens.astype(np.int32)
        # Padding repeats a real row, so that none of its tokens can be outside the vocabulary.
        padding = -len(rows) % batch_size
        rows = np.concatenate([rows, np.repeat(rows[:1], padding, axis=0)])
        weights = np.repeat(np.array([1, 0], np.float32), [len(rows) - padding, padding])
        n_batches = len(rows) // batch_size
        domains[name] = Domain(blocks, np.split(rows, n_batches), np.split(weights, n_batches))
    return domains


def evaluate(
    eval_step: Callable[..., Any], params: Params, domains: Mapping[str, Domain], *, mesh: Mesh
) -> dict[str, np.ndarray]:
    """Return the mean next-token loss of every block of every domain in nats per token, float64 [n]."""
    sharding = batch_sharding(mesh)
    sums = {
        name: [eval_step(params, jax.device_put(tokens, sharding)) for tokens in domain.tokens]
        for name, domain in domains.items()
    }
    return {
        name: np.concatenate(jax.device_get(parts)).astype(np.float64)[: len(domains[name].blocks.tokens)]
        / (domains[name].tokens[0].shape[1] - 1)
        for name, parts in sums.items()
    }


def evaluate_tokens(
    token_step: Callable[..., Any], params: Params, domains: Mapping[str, Domain], *, mesh: Mesh
) -> dict[str, np.ndarray]:
    """Return the loss of every predicted token of every block of every domain in nats, float32 [n, T]."""
    sharding, found = batch_sharding(mesh), {}
    for name, domain in domains.items():  # one at a time: a device holds the losses of a domain, not of all
        parts = [token_step(params, jax.device_put(tokens, sharding)) for tokens in domain.tokens]
        found[name] = np.concatenate(jax.device_get(parts))[: len(domain.blocks.tokens)]
    return found


def summarize(losses: Mapping[str, np.ndarray], domains: Mapping[str, Domain], corpus: Corpus) -> dict[str, float]:
    """Return the row of metrics of an evaluation.

    It has per domain the mean `loss` in nats per token and `bits_per_byte`, which is comparable across tokenizers; and
    the mean loss of the in-domain and out-of-domain ones, `equal` (unweighted) and `natural` (weighted by their shares
    of the corpus). Test sets are not in these means.
    """
    row = {f"eval/{name}/loss": float(np.mean(loss)) for name, loss in losses.items()}
    for name, loss in losses.items():
        nats = float(np.sum(loss)) * corpus.seq_len
        if n_bytes := int(np.sum(domains[name].blocks.n_bytes)):
            row[f"eval/{name}/bits_per_byte"] = nats / math.log(2) / n_bytes
    for side, inside in (("in_domain", True), ("out_of_domain", False)):
        names = [name for name in losses if name in corpus.natural_shares and (name in corpus.in_domain) == inside]
        if names:
            of_side = [row[f"eval/{name}/loss"] for name in names]
            row[f"eval_mean/{side}/equal"] = float(np.mean(of_side))
            shares = [corpus.natural_shares[name] for name in names]
            row[f"eval_mean/{side}/natural"] = float(np.average(of_side, weights=shares))
    return row


def measure_entropy(
    model: Model, params: Params, corpus: Corpus, config: Config, *, mesh: Mesh, tokens: int = 0
) -> dict[str, dict[str, float]]:
    """Return {"entropy": nats per domain, "entropy_relative": its share of ln(i + 1) per domain}.

    Raises `UserError` if no layer has softmax weights.
    """
    domains = load_domains(corpus, config, mesh=mesh, tokens=tokens or config.eval.entropy_tokens or ENTROPY_TOKENS)
    step = jax.jit(make_entropy_step(model), out_shardings=replicated(mesh))
    sums = {name: _sum_over_batches(step, params, domain, mesh) for name, domain in domains.items()}
    return {
        field: {name: float(total[i] / total[2]) for name, total in sums.items()}
        for i, field in enumerate(("entropy", "entropy_relative"))
    }


def _sum_over_batches(step: Callable[..., Any], params: Params, domain: Domain, mesh: Mesh) -> np.ndarray:
    """Return the sum in float64 of the results of `step` over the batches of a domain."""
    sharding = batch_sharding(mesh)
    batches = zip(domain.tokens, domain.weights, strict=True)
    sums = [step(params, *jax.device_put(batch, sharding)) for batch in batches]
    return np.asarray(jax.device_get(sums), np.float64).sum(axis=0)


def restore(workdir: str | Path, *, allow_code: Collection[str] = ()) -> tuple[Config, Model, Params, int, Mesh]:
    """Return config, model, parameters and step of a run's newest checkpoint, and a mesh of the available devices.

    Of a run with several ends it is the checkpoint of the last one that has any.
    `allow_code` names the modules outside seqjax that a mixer may be imported from (`workdirs.load_config`).
    """
    config = workdirs.load_config(workdir, allow_code=allow_code)
    try:
        mesh = make_mesh(**dataclasses.asdict(config.mesh))
    except UserError:
        mesh = make_mesh()  # The run's mesh needs other devices, e.g. those of a pod.
    model = Model(config.model, max_len=config.train.seq_len)
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        model.shapes,
        shardings(mesh, model.shapes, model.axes),
    )
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # Orbax warns that it is read-only, which is intended here.
    try:
        checkpoints = Checkpoints(trained(config, workdir), read_only=True)
        params, step = checkpoints.restore_params(target)
        checkpoints.close()
    finally:
        logging.set_verbosity(verbosity)
    return config, model, params, step, mesh


def main(argv: list[str]) -> None:
    """Print the table and write `evaluation.json` to the workdir, or with --data `test_sets.json`."""
    parser = command_parser("evaluate", description=__doc__)
    workdirs.add_arguments(parser)
    parser.add_argument("--tokens", default=0, type=int, help="at most, per domain; 0 = as in the run's config")
    parser.add_argument(
        "--data",
        default=(),
        type=words,
        metavar="DIR[,DIR]",
        help="directories of prepared blocks to evaluate on, in place of the run's own data and test sets",
    )
    parser.add_argument(
        "--entropy", action="store_true", help="also measure the entropy of attention, on 1M tokens by default"
    )
    args = parser.parse_args(argv)
    if args.tokens < 0:
        raise UserError(f"--tokens must be at least 0, not {args.tokens}.")
    config, model, params, step, mesh = restore(args.workdir, allow_code=args.allow_code)
    sizes = {"seq_len": config.train.seq_len, "vocab_size": config.model.vocab_size}
    if args.data:
        for directory in args.data:
            if not urls.url_of(directory) and not Path(directory).is_dir():
                raise UserError(f"--data: there is no directory {directory}; give one of prepared blocks.")
        corpus = open_test_sets(config.data, args.data, **sizes)
    else:
        corpus = open_corpus(config.data, test_sets=config.eval.path, **sizes)
    result: dict[str, Any] = {"step": step}
    if args.entropy:
        require_entropy(model)
    with jax.set_mesh(mesh):
        domains = load_domains(corpus, config, mesh=mesh, tokens=args.tokens)
        losses = evaluate(jax.jit(make_eval_step(model)), params, domains, mesh=mesh)
        row = summarize(losses, domains, corpus)
        for field in ("loss", "bits_per_byte"):
            result[field] = {name: row.get(f"eval/{name}/{field}") for name in losses}
        result["mean"] = {
            key.removeprefix("eval_mean/"): value for key, value in row.items() if key.startswith("eval_mean/")
        }
        if args.entropy:
            result |= measure_entropy(model, params, corpus, config, mesh=mesh, tokens=args.tokens)
    sys.stdout.write(f"{args.workdir}, step {step}, nats per token\n")
    for name, loss in result["loss"].items():
        side = corpus.side(name)
        spread = f"  entropy {result['entropy'][name]:.4f}" if args.entropy else ""
        spread += f", {result['entropy_relative'][name]:.4f} of ln(i + 1)" if args.entropy else ""
        sys.stdout.write(f"  {name:16s} {loss:8.4f}  {side:13s}{spread}".rstrip() + "\n")
    for name, loss in result["mean"].items():
        side, kind = name.split("/")
        weighed = "domains count equally" if kind == "equal" else "domains count by their tokens"
        sys.stdout.write(f"  {'mean':16s} {loss:8.4f}  {side.replace('_', ' ')}, {weighed}\n")
    name = "test_sets.json" if args.data else "evaluation.json"
    try:
        if url := urls.url_of(args.workdir):
            store.write(f"{url}/{name}", as_json(result))
        else:
            write_json(Path(args.workdir) / name, result)
    except OSError as error:  # of a workdir that is only to be read
        sys.stderr.write(f"{args.workdir}/{name} was not written ({error.strerror}).\n")
    except store.StoreError as error:
        sys.stderr.write(f"{args.workdir}/{name} was not written: {error}\n")


if __name__ == "__main__":
    run_command(main)
