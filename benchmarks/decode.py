"""Time one decoding step against a long cache:

    python -m benchmarks.decode [--quick] [--context=51200] [--batch=64]

Sizes: 12 heads of 64, chunks of 128, bf16, 64 sequences. Cases: attention over the whole cache
(`seqjax.ops.attention.attention_step` and jax.nn's, by XLA), Top-1 Element, and Top-1 Chunk with exact, best_key,
approx (from a table of chunk means) and shortlist (four chunks from the same table); best_key and approx also with four
chunks. Times are per layer. A call steps through up to 12 layers, limited to half of the device's memory: no cache line
is then reused, and dispatch is paid once. The report also shows the bytes to read, the bandwidth and the ratio to
attention.

Results go to benchmarks/results/decode.json and decode.png; a quick run writes to runs/benchmarks/.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, quick="a short cache, as on a CPU")
FLAGS.add_argument("--context", type=int, default=51200, help="slots of the cache (51200)")
FLAGS.add_argument("--batch", type=int, default=64, help="sequences (64)")
options.parse_early(FLAGS, __name__)

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import kernels_pallas as kp
from benchmarks.harness import limits, plot, report
from benchmarks.harness.machine import machine
from benchmarks.harness.timing import time_ms
from seqjax.command_line import run_command
from seqjax.ops.attention import attention_step

LAYERS = 12
CHUNK_CASES = ("exact", "best_key", "best_key-top4", "approx", "approx-top4", "shortlist")
CASES = ("element", *(f"chunk-{case}" for case in CHUNK_CASES))
TABLE = report.Table(
    28,
    (
        report.Column("ms", "ms/layer", ">10.4f"),
        report.Column("ms", f"{LAYERS} layers", ">11.3f", LAYERS),
        report.Column("bytes", "GB", ">8.3f", 1e-9),
        report.Column("gbytes_per_s", "GB/s", ">8.0f"),
        report.Column("limit_ms", "limit ms", ">10.3f"),
        report.Column("times_limit", "x limit", ">9.2f"),
        report.Column("of_attention", "/attention", ">12.3f"),
    ),
)


class Sizes(NamedTuple):
    """A cache of S slots; the last `spare` slots are empty."""

    B: int
    S: int
    H: int
    K: int
    C: int
    spare: int = 57
    dtype: str = "bfloat16"

    @property
    def length(self) -> int:
        """Tokens in the cache, chosen so that the current chunk is neither empty nor full."""
        return self.S - self.spare


def layer_operands(n: Sizes, key: jax.Array) -> tuple[jax.Array, ...]:
    """Return random q [B, H, K], caches [B, S, H, K] and chunk means [B, S // C, H, K]."""
    keys = jax.random.split(key, 3)
    q = jax.random.normal(keys[0], (n.B, n.H, n.K), n.dtype)
    k, v = (jax.random.normal(key, (n.B, n.S, n.H, n.K), n.dtype) for key in keys[1:])
    return q, k, v, kp.chunk_means(k, chunk_size=n.C)


def dense(q, k, v, mean, length):
    """Return jax.nn's attention with a length mask."""
    del mean
    lengths = jnp.broadcast_to(length, q.shape[:1])
    return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lengths)[:, 0]


def function(case: str, implementation: str, n: Sizes) -> Callable:
    """Return f(q, k, v, mean, length) -> o [B, H, K]."""
    if case == "attention":
        return dense if implementation == "jax.nn" else lambda q, k, v, mean, length: attention_step(q, k, v, length)
    if case == "element":
        step = partial(kp.top1_element_decode, implementation=implementation)
        return lambda q, k, v, mean, length: step(q, k, v, length)
    _, selection, *several = case.split("-")
    top_k = int(several[0].removeprefix("top")) if several else 1
    step = partial(
        kp.top1_chunk_decode, chunk_size=n.C, selection=selection, top_k=top_k, implementation=implementation
    )
    if selection == "shortlist":
        return lambda q, k, v, mean, length: step(q, k, v, length, chunk_table_BcGPK=mean[..., None, :])
    return lambda q, k, v, mean, length: step(q, k, v, length, chunk_mean_BcGK=mean if selection == "approx" else None)


def bytes_read(case: str, n: Sizes) -> float:
    """Return the bytes per layer of keys, values and means that the result depends on."""
    row = n.B * n.H * n.K * jnp.dtype(n.dtype).itemsize
    local, means = (n.length - 1) % n.C + 1, n.length // n.C * n.B * n.H * n.K * 4
    return {
        "attention": 2 * n.length * row,
        "element": n.length * row + row,
        "chunk-exact": n.length * row + (n.C + local) * row,
        "chunk-best_key": n.length * row + (n.C + local) * row,
        "chunk-best_key-top4": n.length * row + (4 * n.C + local) * row,
        "chunk-approx": means + 2 * (n.C + local) * row,
        "chunk-approx-top4": means + 2 * (4 * n.C + local) * row,
        "chunk-shortlist": means + 4 * n.C * row + (n.C + 2 * local) * row,
    }[case]


def measure(f: Callable, layers: list[tuple], length: jax.Array, *, repeats: int, seconds: float) -> dict[str, Any]:
    """Return milliseconds per layer."""

    @jax.jit
    def step(layers, length):
        return [f(*operands, length) for operands in layers]

    runs = time_ms(lambda: step(layers, length), repeats=repeats, seconds=seconds)
    runs = [ms / len(layers) for ms in runs]
    return {"ms": statistics.median(runs), "runs": runs}


def line(row: dict[str, Any]) -> str:
    """Return a table row."""
    return TABLE.row(f"{row['case']} {row['implementation']}", row)


def run(n: Sizes, n_layers: int, *, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Yield a row per case and implementation: attention first, then ratios to the faster attention."""
    on_gpu, device = jax.default_backend() == "gpu", limits.device()
    draw = jax.jit(partial(layer_operands, n))
    layers = [draw(key) for key in jax.random.split(jax.random.key(0), n_layers)]
    length = jnp.asarray(n.length, jnp.int32)
    names = ("triton", "xla") if on_gpu else ("xla",)
    todo = [("attention", "step"), ("attention", "jax.nn")]
    todo += [(case, name) for case in CASES for name in names]
    rows, attention_ms = [], float("inf")
    for case, name in todo:
        row: dict[str, Any] = {"case": case, "implementation": name, "bytes": bytes_read(case, n)}
        try:
            row |= measure(function(case, name, n), layers, length, repeats=repeats, seconds=seconds)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
        else:
            row["gbytes_per_s"] = row["bytes"] / row["ms"] / 1e6
            if device is not None:
                row["limit_ms"] = 1e3 * row["bytes"] / device.bytes
                row["times_limit"] = row["ms"] / row["limit_ms"]
            if case == "attention":
                attention_ms = min(attention_ms, row["ms"])
            row["of_attention"] = row["ms"] / attention_ms
        rows.append(row)
        print(line(row), flush=True)
    return rows


def plot_report(written: dict[str, Any], path: Path) -> None:
    """Return milliseconds per layer."""
    measured = [row for row in written["results"] if "error" not in row]
    rows = [plot.Bar(f"{row['case']}, {row['implementation']}", row["ms"], row.get("runs", ())) for row in measured]
    n = written["settings"]
    title = f"One decoding step: batch {n['B']}, context {n['S']:,}, {n['H']} heads of {n['K']}, {n['dtype']}"
    plot.bars(path, rows, title=f"{title}, {written['machine']['device']}", axis="ms per layer and token")


def layers_that_fit(n: Sizes) -> int:
    """Return the number of layers, 1 to 12, that fit into half of the device's memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    one = 2 * n.B * n.S * n.H * n.K * jnp.dtype(n.dtype).itemsize
    return max(1, min(LAYERS, int(stats.get("bytes_limit", 0) / 2 / one)))


def main(argv: list[str]) -> None:
    """Measure, print and write."""
    args = FLAGS.parse_args(argv)
    quick = args.quick or jax.default_backend() == "cpu"
    if quick:
        n, repeats, seconds = Sizes(2, 1024, 2, 16, 64, spare=17, dtype="float32"), 3, 0.02
    else:
        n, repeats, seconds = Sizes(args.batch, args.context, 12, 64, 128), 5, 0.2
    n_layers = layers_that_fit(n)
    print(f"{n}, {n_layers} distinct caches\n{TABLE.header()}")
    written: dict[str, Any] = {"machine": machine(), "settings": n._asdict() | {"layers": n_layers}}
    written["results"] = run(n, n_layers, repeats=repeats, seconds=seconds)
    path = options.destination(args.json, "decode", recorded=not quick)
    report.save(path, written)
    plot_report(written, path.with_suffix(".png"))
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
