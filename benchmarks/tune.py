"""Tile sizes of the Triton kernels of Top-1 Element, the delta rule and the loss on the GPU at hand:

    python -m benchmarks.tune [--kernels=forward,evaluate,dq,dk,dkv] [--length=32768] [--dim=64] [--seconds=300]
    python -m benchmarks.tune --kernels=solve,state,out,dstate,rows,columns
    python -m benchmarks.tune --kernels=loss

Times one kernel at a time over candidate tiles, the table's entry first, and prints them in order. Those of the second
line are the delta rule's, at the size of a layer of Gated DeltaNet at 110m whatever the flags say: 16 sequences of
2,048 tokens, 6 heads of 96 keys and 192 values, bf16. The loss has a chunk of 4,096 tokens and a vocabulary of 32,000.
Nothing is written: the winner goes by hand, with its reason, into kernels_pallas/top1_element/triton/tile_sizes.py,
kernels_pallas/delta_rule/triton/scan.py or kernels_pallas/cross_entropy/triton/loss.py.
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
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.harness import limits
from benchmarks.harness.timing import time_ms
from benchmarks.kernels import operands
from kernels_pallas import device
from kernels_pallas.top1_element.triton import tile_sizes
from seqjax.utils import UserError, run_command

KERNELS = ("forward", "evaluate", "dq", "dk", "dkv")
DELTA_KERNELS = ("solve", "state", "out", "dstate", "rows", "columns")
LOSS_KERNELS = ("loss",)
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


def delta_calls(*, B: int = 16, T: int = 2048, H: int = 6, K: int = 96, V: int = 192) -> dict[str, Callable]:
    """Functions of no arguments that run one kernel of the delta rule each, with the tiles that its table has then."""
    from kernels_pallas.delta_rule.triton import scan

    seen: dict[str, Callable] = {}
    launch = scan._launch  # its arguments are what a kernel runs on

    def recorder(kind: str, kernel: Any, *arrays: Any, out: list, shapes: tuple, has_gate: bool) -> tuple:
        like = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
        options = {"out": like(out), "shapes": like(shapes), "has_gate": has_gate}

        def call() -> Any:
            keys = jax.random.split(jax.random.key(0), len(arrays))
            given = [0.1 * jax.random.uniform(key, x.shape).astype(x.dtype) for key, x in zip(keys, like(arrays))]
            run = jax.jit(lambda *x: launch(kind, kernel, *x, **options))
            return lambda: run(*given)

        seen[kind] = call
        return tuple(jnp.zeros(x.shape, x.dtype) for x in out)

    def both(q, k, v, beta, log_g, initial):
        out, pull = jax.vjp(partial(scan.run, chunk_size=64), q, k, v, beta, log_g, initial)
        return pull(out)

    rows = (B, T, H)
    sizes = [((*rows, K), "bfloat16"), ((*rows, K), "bfloat16"), ((*rows, V), "bfloat16"), (rows, "float32")]
    sizes += [(rows, "float32"), ((B, H, K, V), "float32")]
    with mock.patch.object(scan, "_launch", recorder):
        jax.eval_shape(both, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in sizes))
    return seen


def delta_candidates(first: Any) -> list[Any]:
    """The table's entry, then others: blocks of 32 and 64 values, 4 and 8 warps, up to 3 blocks or chunks in flight."""
    found = [first]
    for block, warps, stages in product((32, 64), (4, 8), (1, 2, 3)):
        found.append(first._replace(block=block, warps=warps, stages=stages))
    return list(dict.fromkeys(found))


def loss_call(*, n_tokens: int = 4096, n_vocab: int = 32000) -> Callable:
    """A jitted function of no arguments that makes the losses and the gradient of a chunk's logits."""
    from kernels_pallas.cross_entropy.triton import loss

    shape = (1, n_tokens)
    logits = 3 * jax.random.normal(jax.random.key(0), (*shape, n_vocab))
    targets = jax.random.randint(jax.random.key(1), shape, 0, n_vocab)
    run = jax.jit(partial(loss.run, dtype=jnp.dtype("bfloat16")))
    return lambda: run(logits, targets, jnp.ones(shape))


def loss_candidates(first: Any) -> list[Any]:
    """The table's entry, then others: 2,048 to 16,384 logits of a token at a time, 8 to 32 of them per thread."""
    found = [first]
    for block, warps in product((2048, 4096, 8192, 16384), (4, 8, 16, 32)):
        if 8 <= block // (32 * warps) <= 32:
            found.append(first._replace(block=block, warps=warps))
    return list(dict.fromkeys(found))


def fastest(kernel: str, table: dict, key: Any, tiles: list[Any], made: Callable, end: float) -> None:
    """Time `made()`, which reads `table[key]`, with each of the tiles while there is time; print the best."""
    first, rows = table[key], []
    for entry in tiles:
        if time.monotonic() > end:
            print("the time is over")
            break
        table[key] = entry
        try:
            ms = statistics.median(time_ms(made(), repeats=3, seconds=0.05))
        except (RuntimeError, ValueError) as error:  # too much shared memory, mostly
            print(f"{kernel} {entry}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        rows.append((ms, entry))
        print(f"{kernel} {entry}: {ms:.3f} ms", flush=True)
    table[key] = first
    print(f"{kernel}, fastest first:", *(f"  {ms:.3f} ms {entry}" for ms, entry in sorted(rows)[:5]), sep="\n")


def main(argv: list[str]) -> None:
    """Measure and print."""
    given = FLAGS.parse_args(argv)
    options.check_known("kernels", given.kernels, (*KERNELS, *DELTA_KERNELS, *LOSS_KERNELS))
    capability = device.compute_capability()
    if capability is None:
        raise UserError("benchmarks.tune times Triton kernels, and JAX sees no GPU here; run it on a machine with one.")
    args, calls = (), {}
    if set(given.kernels) & set(KERNELS):
        args = operands(limits.Sizes(1, given.length, 12, given.dim), "bfloat16")
    if set(given.kernels) & set(DELTA_KERNELS):
        calls = delta_calls()
    end = time.monotonic() + given.seconds
    for kernel in given.kernels:
        if kernel in DELTA_KERNELS:
            from kernels_pallas.delta_rule.triton.scan import TILES

            key = (kernel, 16)
            fastest(kernel, TILES, key, delta_candidates(TILES[key]), calls[kernel], end)
        elif kernel in LOSS_KERNELS:
            from kernels_pallas.cross_entropy.triton import loss

            fastest(kernel, loss.TILES, kernel, loss_candidates(loss.TILES[kernel]), loss_call, end)
        else:
            entry = "forward" if kernel == "evaluate" else kernel
            key = (entry, 64 if given.dim <= 64 else 128, True, capability >= 90)
            first = tile_sizes.tiles(entry, given.dim, jnp.dtype("bfloat16"))
            fastest(kernel, tile_sizes.TILES, key, candidates(kernel, first), partial(call, kernel, args), end)


if __name__ == "__main__":
    run_command(main)
