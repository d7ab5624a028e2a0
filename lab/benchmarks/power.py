"""Measure power and energy of kernels that FLOPs, bytes and exponentials do not bound.

    python -m lab.benchmarks.power [--length=102400] [--seconds=3]

It repeats exact and approx selection, cuDNN attention (12 heads of 64, bf16, one sequence of normalised random q and k)
and a large matrix product for some seconds each. It reports sustained milliseconds per call, power and clock from
nvidia-smi, joules per call, and the joules that the matrix product needs for the same FLOPs. At its power limit, a GPU
only gets faster by using less energy per call. Writes benchmarks/results/power.json.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__)
FLAGS.add_argument("--length", type=int, default=102400, help="tokens of the one sequence (102400)")
FLAGS.add_argument("--seconds", type=float, default=3, help="per case (3)")
options.parse_early(FLAGS, __name__)

import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import kernels
from benchmarks.harness import limits, report
from benchmarks.harness.machine import machine
from benchmarks.harness.timing import calls_within
from seqjax.command_line import run_command
from seqjax.errors import UserError

PRODUCT = 8192  # rows and columns of the multiplied matrices
QUERY = [
    "nvidia-smi",
    "--query-gpu=power.draw.instant,clocks.sm,power.limit",
    "--format=csv,noheader,nounits",
    "-i",
    "0",
]
TABLE = report.Table(
    24,
    (
        report.Column("ms", "ms", ">9.3f"),
        report.Column("watts", "W", ">7.0f"),
        report.Column("mhz", "MHz", ">7.0f"),
        report.Column("joules", "J", ">8.3f"),
        report.Column("product_joules", "J of a product", ">16.3f"),
    ),
)


def sampled(call: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Repeat a call while sampling power and clock; discard the first third, in which they settle."""
    calls = calls_within(call, seconds)
    meter = subprocess.Popen([*QUERY, "-lms", "100"], stdout=subprocess.PIPE, text=True)
    assert meter.stdout is not None
    try:
        lines = [meter.stdout.readline()]  # wait until the meter has started
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        seconds = time.perf_counter() - start
    finally:
        meter.terminate()
    lines += meter.communicate()[0].splitlines()
    rows = [[float(x) for x in line.split(",")] for line in lines if line.count(",") == 2]
    if len(rows) < 6:
        raise RuntimeError(f"nvidia-smi gave {len(rows)} samples in {seconds:.1f} s: raise --seconds")
    watts, mhz, limit = (statistics.mean(column) for column in zip(*rows[len(rows) // 3 : -1], strict=True))
    ms = 1e3 * seconds / calls
    return {"ms": ms, "watts": watts, "limit_watts": limit, "mhz": mhz, "joules": ms * watts / 1e3}


def main(argv: list[str]) -> None:
    """Measure, print and write."""
    args = FLAGS.parse_args(argv)
    if jax.default_backend() != "gpu":
        raise UserError("power reads nvidia-smi, and JAX sees no GPU here. Run it on a machine with a GPU.")
    n = limits.Sizes(1, args.length, 12, 64)
    q, k, v, _ = kernels.operands(n, "bfloat16")
    a = jax.random.normal(jax.random.key(1), (PRODUCT, PRODUCT), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    cases: dict[str, tuple[Callable[[], Any], float]] = {"product": (partial(product, a, a), 2.0 * PRODUCT**3)}
    for case, name in (
        ("select-exact", "triton"),
        ("select-exact", "pallas"),
        ("select-approx", "triton"),
        ("attention", "cudnn"),
    ):
        f = jax.jit(kernels.function(case, name, n))
        cases[f"{case} {name}"] = (partial(f, q, k, v), limits.total(limits.phases(case, n)[0]).flops)
    rows: dict[str, dict[str, float]] = {}
    written: dict[str, Any] = {"machine": machine(), "length": n.T, "results": rows}
    path = options.destination(args.json, "power", recorded=True)
    print(TABLE.header())
    for name, (call, flops) in cases.items():
        row = sampled(call, args.seconds)
        per_flop = rows["product"]["joules"] / cases["product"][1] if rows else row["joules"] / flops
        rows[name] = row | {"product_joules": per_flop * flops}
        print(TABLE.row(name, rows[name]), flush=True)
        report.save(path, written)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
