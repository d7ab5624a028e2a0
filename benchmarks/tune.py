"""Tile sizes of the Triton kernels of Top-1 Element on the GPU at hand:

    python -m benchmarks.tune [--kernels=forward,evaluate,dq,dk,dkv] [--length=32768] [--dim=64] [--seconds=300]

Times one kernel at a time over candidate tiles, the table's entry first, and prints them in order.
Nothing is written: the winner goes into kernels_pallas/top1_element/triton/tile_sizes.py by hand, with its reason.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, writes=False)
FLAGS.add_argument("--kernels", type=options.words, default=["forward", "dq", "dk"], help="(forward,dq,dk)")
FLAGS.add_argument("--length", type=int, default=32768, help="tokens (32768)")
FLAGS.add_argument("--dim", type=int, default=64, help="head dim (64)")
FLAGS.add_argument("--seconds", type=float, default=300, help="begin nothing after so many (300)")
options.parse_early(FLAGS, __name__)

import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import limits
from benchmarks.harness.timing import time_ms
from benchmarks.kernels import operands
from kernels_pallas import device
from kernels_pallas.top1_element.triton import tile_sizes
from seqjax.utils import UserError, run_command

KERNELS = ("forward", "evaluate", "dq", "dk", "dkv")
OUTPUT = {"dq": 0, "dk": 1, "dkv": 1}  # of the backward pass; unused results are not computed


def candidates(kernel: str, first: Any) -> list[Any]:
    """The table's entry, then others: outer tiles of 64 and 128, inner ones of 32 to 128."""
    found = [first]
    for outer, inner, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        m, n = (inner, outer) if kernel in ("dk", "dkv") else (outer, inner)
        if inner <= outer and not (warps == 8 and outer == 64):
            found.append(first._replace(m=m, n=n, warps=warps, stages=stages))
    return list(dict.fromkeys(found))


def call(kernel: str, args: tuple) -> Callable:
    """A jitted function of no arguments that runs one kernel (forward with its search of the best key)."""
    from kernels_pallas.top1_element.triton import attention as backend

    q, k, v, do = args
    scale = q.shape[-1] ** -0.5
    if kernel == "evaluate":
        f = jax.jit(lambda: backend.evaluate(q, k, v, scale=scale))
    elif kernel == "forward":
        f = jax.jit(lambda: backend.forward(q, k, v, scale=scale))
    else:
        index, lse, soft = jax.jit(lambda: backend.forward(q, k, v, scale=scale))()
        v_grad = "soft" if kernel == "dkv" else "hard"
        rest = (index, lse, soft, do)
        run = jax.jit(lambda *x: backend.backward(*x, scale=scale, v_grad=v_grad)[OUTPUT[kernel]])
        return lambda: run(q, k, v, *rest)
    return f


def main(argv: list[str]) -> None:
    """Measure and print."""
    given = FLAGS.parse_args(argv)
    options.check_known("kernels", given.kernels, KERNELS)
    capability = device.compute_capability()
    if capability is None:
        raise UserError("benchmarks.tune times Triton kernels, and JAX sees no GPU here; run it on a machine with one.")
    args = operands(limits.Sizes(1, given.length, 12, given.dim), "bfloat16")
    begin = time.monotonic()
    for kernel in given.kernels:
        entry = "forward" if kernel == "evaluate" else kernel
        key = (entry, 64 if given.dim <= 64 else 128, True, capability >= 90)
        first, rows = tile_sizes.tiles(entry, given.dim, jnp.dtype("bfloat16")), []
        for tiles in candidates(kernel, first):
            if time.monotonic() - begin > given.seconds:
                print("the time is over")
                break
            tile_sizes.TILES[key] = tiles
            try:
                ms = statistics.median(time_ms(call(kernel, args), repeats=3, seconds=0.05))
            except (RuntimeError, ValueError) as error:  # too much shared memory, mostly
                print(f"{kernel} {tiles}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            rows.append((ms, tiles))
            print(f"{kernel} {tiles}: {ms:.3f} ms", flush=True)
        tile_sizes.TILES[key] = first
        print(f"{kernel}, fastest first:", *(f"  {ms:.3f} ms {tiles}" for ms, tiles in sorted(rows)[:5]), sep="\n")


if __name__ == "__main__":
    run_command(main)
