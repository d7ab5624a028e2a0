"""Tune tile sizes of Triton kernels, one kernel at a time.

    python -m lab.benchmarks.tune [--kernels=forward,evaluate,dq,dk,dkv] [--length=32768] [--dim=64] [--seconds=300]
    python -m lab.benchmarks.tune --kernels=solve,mix,fused,state,out,dstate,rows,columns
    python -m lab.benchmarks.tune --kernels=channel_sums,channel_pairs,channel_solve,channel_mix
    python -m lab.benchmarks.tune --kernels=channel_state,channel_out,channel_d_scores,channel_keys
    python -m lab.benchmarks.tune --kernels=channel_weights,channel_pass,channel_d_scores,channel_keys --kda
    python -m lab.benchmarks.tune --kernels=selective,selective_bwd
    python -m lab.benchmarks.tune --kernels=conv,conv_bwd
    python -m lab.benchmarks.tune --kernels=shift,shift_bwd,shift_moved,shift_bwd_moved
    python -m lab.benchmarks.tune --kernels=operands_forward,operands_backward
    python -m lab.benchmarks.tune --kernels=norm_forward,norm_backward,norm_forward_all,norm_backward_all
    python -m lab.benchmarks.tune --kernels=loss

The script times each candidate tile, the table's entry first, and prints all candidates sorted by time. All but the
kernels on the first line have fixed sizes that ignore the flags, mostly 16 sequences of 2,048 tokens in bf16:

    first line       Top-1 Element, at --length and --dim
    solve ...        delta rule as in Gated DeltaNet at 110m: 6 heads of 96 keys and 192 values
    channel_*        linear attention with a decay per channel as in RWKV-7, 12 heads of 64; `--kda`: as in KDA, 6 heads
                     of 128, with decays that need no halving of chunks; launches for outputs and gradients are timed
                     together
    selective*       Mamba-1's selective scan: 1,536 channels of 16 states
    conv*            short convolutions for q, k and v in Gated DeltaNet, three launches together
    shift*           token shift with six branches in RWKV-7; `_moved`: with per-token shifts, five branches in RWKV-6
    operands_*       operands of RWKV-7's recurrence, with the value mix, without the low-rank products
    norm_*           norm after RWKV-7's recurrence, with bonus and gate; `_all`: Mamba-2's norm over all channels (24
                     heads of 64)
    loss             a chunk of 4,096 tokens with a vocabulary of 32,000

It writes nothing. Enter the fastest tile by hand, with the reason, into
kernels_pallas/top1_element/triton/tile_sizes.py, or in kernels_pallas into `triton/scan.py` (delta_rule,
linear_attention, selective_scan), `triton/conv.py` (short_conv), `triton/shift.py` (token_shift), `triton/norm.py`
(head_norm) or `triton/loss.py` (cross_entropy).
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, writes=False)
FLAGS.add_argument("--kernels", type=options.words, default=["forward", "dq", "dk"], help="(forward,dq,dk)")
FLAGS.add_argument("--length", type=int, default=32768, help="tokens (32768)")
FLAGS.add_argument("--dim", type=int, default=64, help="head dim (64)")
FLAGS.add_argument("--kda", action="store_true", help="the kernels of channels at the sizes of KDA")
FLAGS.add_argument("--seconds", type=float, default=300, help="start no measurement after this time (300)")
options.parse_early(FLAGS, __name__)

import math
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
from seqjax.command_line import run_command
from seqjax.errors import UserError

KERNELS = ("forward", "evaluate", "dq", "dk", "dkv")
DELTA_KERNELS = ("solve", "mix", "fused", "state", "out", "dstate", "rows", "columns")
CHANNELS = ("sums", "pairs", "solve", "mix", "state", "out", "d_scores", "keys")
CHANNEL_KERNELS = tuple(f"channel_{name}" for name in CHANNELS)
TIED_KERNELS = tuple(f"channel_{name}" for name in ("weights", "solve", "pass", "d_scores", "keys"))  # KDA's
SELECTIVE_KERNELS = {"selective": "scan", "selective_bwd": "scan_bwd"}
CONV_KERNELS = ("conv", "conv_bwd")
SHIFT_KERNELS = ("shift", "shift_bwd", "shift_moved", "shift_bwd_moved")
OPERAND_KERNELS = ("operands_forward", "operands_backward")
NORM_KERNELS = tuple(f"norm_{name}" for name in ("forward", "backward", "forward_all", "backward_all"))
LOSS_KERNELS = ("loss",)
OUTPUT = {"dq": 0, "dk": 1, "dkv": 1}  # index in the backward results; unused results are not computed


def candidates(kernel: str, first: Any) -> list[Any]:
    """Return the table's entry, then others: outer tiles of 64 and 128, inner tiles of 32 to 128."""
    tiles = [first]
    for outer, inner, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        m, n = (inner, outer) if kernel in ("dk", "dkv") else (outer, inner)
        if inner <= outer and not (warps == 8 and outer == 64):
            tiles.append(first._replace(m=m, n=n, warps=warps, stages=stages))
    return list(dict.fromkeys(tiles))


def call(kernel: str, args: tuple) -> Callable:
    """Return a jitted function without arguments that runs one kernel ("forward" includes the best-key search)."""
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


def scan_calls(scan: Any, f: Callable, *sizes: tuple) -> dict[str, Callable]:
    """Return functions without arguments, one per kernel of a recurrence, that use the current tile table.

    `scan` is the module that launches the kernels for `f`. `f` and its gradient are traced for arrays of `sizes`. A
    kernel with several launches, for outputs and gradients, runs all of them.
    """
    seen: dict[str, list[Callable]] = {}
    launch = scan._launch  # wrapped below to record the kernel arguments

    def recorder(kind: str, *inputs: Any, out: list, shapes: tuple, **options: Any) -> tuple:
        like = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
        arrays, kernel = (
            [x for x in inputs if isinstance(x, jax.Array)],
            [x for x in inputs if not isinstance(x, jax.Array)],
        )
        run = partial(launch, kind, *kernel, out=like(out), shapes=like(shapes), **options)
        seen.setdefault(kind, []).append(partial(jitted, run, like(arrays)))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in out)

    def jitted(run: Callable, shapes: list) -> Callable:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        inputs = [0.1 * jax.random.uniform(key, x.shape) for key, x in zip(keys, shapes, strict=True)]
        inputs = [x.astype(shape.dtype) for x, shape in zip(inputs, shapes, strict=True)]
        program = jax.jit(lambda *x: run(*x))
        return lambda: program(*inputs)

    def together(makers: list[Callable]) -> Callable:
        programs = [make() for make in makers]
        return lambda: [program() for program in programs]

    def both(*arrays: jax.Array) -> Any:
        out, pull = jax.vjp(f, *arrays)
        return pull(out)

    with mock.patch.object(scan, "_launch", recorder):
        jax.eval_shape(both, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in sizes))
    return {kind: partial(together, makers) for kind, makers in seen.items()}


def delta_calls(*, B: int = 16, T: int = 2048, H: int = 6, K: int = 96, V: int = 192) -> dict[str, Callable]:
    """Return the delta-rule kernels, as in Gated DeltaNet."""
    from kernels_pallas.delta_rule.triton import scan

    rows, half, wide = (B, T, H), "bfloat16", "float32"
    sizes = [((*rows, K), half), ((*rows, K), half), ((*rows, V), half), (rows, wide), (rows, wide)]
    calls = {}
    for least in (0, math.inf):  # with the outputs in the pass over time, and in a launch after it
        with mock.patch.object(scan, "FUSED", least):
            jax.clear_caches()
            calls |= scan_calls(scan, partial(scan.run, chunk_size=64), *sizes, ((B, H, K, V), wide))
    return calls


def channel_calls(
    *, B: int = 16, T: int = 2048, H: int = 12, K: int = 64, V: int = 64, tied: bool = False
) -> dict[str, Callable]:
    """Return the kernels of linear attention with a decay per channel and a low-rank part, as in RWKV-7 or KDA."""
    from kernels_pallas.linear_attention.triton import scan

    def f(r: jax.Array, k: jax.Array, v: jax.Array, log_w: jax.Array, a: jax.Array, b: jax.Array, s: jax.Array) -> Any:
        options = {"chunk_size": 64, "min_log_w": -float("inf") if tied else -math.exp(-0.5)}
        return scan.run(r, k, v, log_w, None, a, None if tied else b, s, **options)

    k, v, half, wide = (B, T, H, K), (B, T, H, V), "bfloat16", "float32"
    calls = scan_calls(scan, f, (k, half), (k, half), (v, half), (k, wide), (k, half), (k, half), ((B, H, K, V), wide))
    return {f"channel_{kind}": call for kind, call in calls.items()}


def keys_candidates(first: Any) -> list[Any]:
    """Return the table's entry, then others: blocks of 64 and 128 values, 16 to 64 keys, 4 and 8 warps."""
    tiles = [first]
    for block, keys, warps, stages in product((64, 128), (16, 32, 64), (4, 8), (1, 2)):
        tiles.append(first._replace(block=block, keys=keys, warps=warps, stages=stages))
    return list(dict.fromkeys(tiles))


def scan_candidates(first: Any) -> list[Any]:
    """Return the table's entry, then others: 32 to 128 values (32 and 64 keys), 4 and 8 warps, 1 to 3 stages."""
    tiles = [first]
    for block, warps, stages in product((32, 64, 128), (4, 8), (1, 2, 3)):
        entry = first._replace(block=block, warps=warps, stages=stages)
        tiles += [entry._replace(keys=keys) for keys in (32, 64)] if hasattr(first, "keys") else [entry]
    return list(dict.fromkeys(tiles))


def selective_call(kernel: str, *, B: int = 16, T: int = 2048, E: int = 1536, N: int = 16) -> Callable:
    """Return a jitted function without arguments that runs Mamba-1's selective scan or its gradient."""
    from kernels_pallas.selective_scan.triton import scan

    keys = jax.random.split(jax.random.key(0), 4)
    x, dt = (jax.random.normal(key, (B, T, E), "bfloat16") for key in keys[:2])
    b, c = (jax.random.normal(key, (B, T, N), "bfloat16") for key in keys[2:])
    a, d, state = -jnp.broadcast_to(jnp.arange(1.0, N + 1), (E, N)), jnp.ones(E), jnp.zeros((B, E, N))
    options: dict[str, Any] = {"chunk_size": None, "dt_bias_E": jnp.full(E, -3.0)}
    forward = partial(jax.jit(partial(scan.forward, keep=True, **options)), x, dt, a, b, c, d, state)
    if kernel == "selective":
        return forward
    return partial(jax.jit(partial(scan.backward, **options)), x, dt, a, b, c, d, forward()[2], x, state)


def selective_candidates(kernel: str, first: Any) -> list[Any]:
    """Return the table's entry, then others: 8 to 32 channels per warp; backward, chunks of 32 or 64."""
    tiles, cuts = [first], [(first.full, first.steps)]
    if kernel == "selective_bwd":
        cuts = [(first.full, 32), (first.full, 64), (3072, 64)]
    for e, u, (full, steps) in product((8, 16, 32), (2, 4), cuts):
        tiles.append(first._replace(e=e, u=u, full=full, steps=steps))
    return list(dict.fromkeys(tiles))


def conv_call(kernel: str, *, B: int = 16, T: int = 2048, heads: int = 6, K: int = 96, V: int = 192) -> Callable:
    """Return a jitted function without arguments that computes Gated DeltaNet's q, k and v, or all gradients."""
    from kernels_pallas.short_conv.triton import conv

    def f(x: jax.Array, w: jax.Array, norm: int | None) -> jax.Array:
        return conv.run(x, w, None, None, silu=True, l2_heads=norm, scale=1.0, eps=1e-6)

    keys = jax.random.split(jax.random.key(0), 3)
    widths, norms = (heads * K, heads * K, heads * V), (heads, heads, None)
    xs = [jax.random.normal(key, (B, T, E), "bfloat16") for key, E in zip(keys, widths, strict=True)]
    ws = [jax.random.uniform(key, (E, 4)) for key, E in zip(keys, widths, strict=True)]

    def forward(xs: list, ws: list) -> list:
        return [f(*arrays) for arrays in zip(xs, ws, norms, strict=True)]

    if kernel == "conv":
        run = jax.jit(forward)
        return lambda: run(xs, ws)
    gradients = jax.jit(lambda xs, ws, dys: jax.vjp(forward, xs, ws)[1](dys))
    return lambda: gradients(xs, ws, xs)


def conv_candidates(first: Any) -> list[Any]:
    """Return the table's entry, then others: 4 or 8 channels per thread, 16 to 64 positions, 2 to 8 in flight."""
    tiles = [first]
    for row, warps, steps, unroll in product((512, 1024, 2048), (4, 8), (16, 32, 64), (2, 4, 8)):
        if row // (32 * warps) in (4, 8):
            tiles.append(first._replace(row=row, warps=warps, steps=steps, unroll=unroll))
    return list(dict.fromkeys(tiles))


def shift_call(kernel: str, *, B: int = 16, T: int = 2048, D: int = 768) -> Callable:
    """Return a jitted function without arguments that runs a token-shift kernel, as in RWKV-7 or ("moved") RWKV-6."""
    from kernels_pallas.token_shift.triton import shift

    is_moved = kernel.endswith("_moved")
    N, keys = 5 if is_moved else 6, jax.random.split(jax.random.key(0))
    x, moves = (jax.random.normal(key, (*n, B, T, D), "bfloat16") for key, n in zip(keys, ((), (N,)), strict=True))
    inputs = (x, jnp.full((N, D), 0.5), moves if is_moved else None)

    def forward(x: jax.Array, mu: jax.Array, moves: jax.Array | None) -> tuple[jax.Array, ...]:
        return shift.run(x, None, tuple(mu), moves)

    if "bwd" in kernel:
        return partial(jax.jit(lambda *inputs: jax.vjp(forward, *inputs)[1]((x,) * N)), *inputs)
    return partial(jax.jit(forward), *inputs)


def operands_call(kernel: str, *, B: int = 16, T: int = 2048, H: int = 12, K: int = 64) -> Callable:
    """Return a jitted function without arguments that computes RWKV-7's recurrence operands, or their gradients."""
    from kernels_pallas.wkv7_operands.triton import operands as wkv7

    data = [jax.random.normal(key, (B, T, H, K), "bfloat16") for key in jax.random.split(jax.random.key(0), 7)]
    inputs = (tuple(data), jnp.ones((B, 6, H, K)))
    forward = jax.jit(lambda *inputs: wkv7.forward(*inputs)[0])
    if kernel == "operands_forward":
        return partial(forward, *inputs)
    return partial(jax.jit(lambda *inputs: wkv7.backward(inputs[:2], inputs[2])), *inputs, forward(*inputs))


def operand_candidates(first: Any) -> list[Any]:
    """Return the table's entry, then others: 512 and 1,024 channels, 4 or 8 per thread, 1 to 3 in flight."""
    tiles = [first]
    for channels, each, steps, stages in product((512, 1024), (4, 8), (4, 16, 32), (1, 2, 3)):
        tiles.append(first._replace(channels=channels, each=each, steps=steps, stages=stages))
    return list(dict.fromkeys(tiles))


def loss_call(*, n_tokens: int = 4096, n_vocab: int = 32000) -> Callable:
    """Return a jitted function without arguments that computes a chunk's losses and logit gradients."""
    from kernels_pallas.cross_entropy.triton import loss

    shape = (1, n_tokens)
    logits = 3 * jax.random.normal(jax.random.key(0), (*shape, n_vocab))
    targets = jax.random.randint(jax.random.key(1), shape, 0, n_vocab)
    run = jax.jit(partial(loss.run, dtype=jnp.dtype("bfloat16")))
    return lambda: run(logits, targets, jnp.ones(shape))


def loss_candidates(first: Any) -> list[Any]:
    """Return the table's entry, then others: blocks of 2,048 to 16,384 logits per token, 8 to 32 per thread."""
    tiles = [first]
    for block, warps in product((2048, 4096, 8192, 16384), (4, 8, 16, 32)):
        if 8 <= block // (32 * warps) <= 32:
            tiles.append(first._replace(block=block, warps=warps))
    return list(dict.fromkeys(tiles))


def norm_call(kernel: str, *, B: int = 16, T: int = 2048) -> Callable:
    """Return a jitted function without arguments that runs a norm kernel: per head (RWKV-7), or over all (Mamba-2)."""
    from kernels_pallas.head_norm.interface import Call
    from kernels_pallas.head_norm.triton import norm

    is_all = kernel.endswith("_all")
    call, H, V = Call("silu" if is_all else "none", is_all, 1e-5), 24 if is_all else 12, 64
    keys = jax.random.split(jax.random.key(0), 4)
    x, gate, skip, dy = (jax.random.normal(key, (B, T, H, V), "bfloat16") for key in keys)
    gain = jnp.ones((B, H, V))
    inputs = (x, gate, (skip, jnp.ones((B, T, H))), gain, None if is_all else gain)
    backward = jax.jit(lambda *arrays: norm.backward(call, arrays[:-1], arrays[-1]))
    forward = jax.jit(lambda *arrays: norm.forward(call, *arrays)[0])
    return partial(backward, *inputs, dy) if "backward" in kernel else partial(forward, *inputs)


def norm_candidates(first: Any) -> list[Any]:
    """Return the table's entry, then others: 512 to 2,048 channels, 4 to 16 per thread, 1 to 3 in flight."""
    tiles, is_all = [first], first.channels == 1
    for channels, each, steps, stages in product((512, 1024, 2048), (4, 8, 16), (4, 16, 64), (1, 2, 3)):
        tiles.append(first._replace(channels=1 if is_all else channels, each=each, steps=steps, stages=stages))
    return list(dict.fromkeys(tiles))


def fastest(kernel: str, table: dict, key: Any, tiles: list[Any], made: Callable, end: float) -> None:
    """Time `made()`, which reads `table[key]`, with each tile until `end`; print the best."""
    first, rows = table[key], []
    for entry in tiles:
        if time.monotonic() > end:
            print(f"--seconds reached before {kernel} {entry}")
            break
        table[key] = entry
        try:
            ms = statistics.median(time_ms(made(), repeats=3, seconds=0.05))
        except (RuntimeError, ValueError) as error:  # usually too much shared memory
            print(f"{kernel} {entry}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        rows.append((ms, entry))
        print(f"{kernel} {entry}: {ms:.3f} ms", flush=True)
    table[key] = first
    print(f"{kernel}, fastest first:", *(f"  {ms:.3f} ms {entry}" for ms, entry in sorted(rows)[:5]), sep="\n")


def main(argv: list[str]) -> None:
    """Measure and print."""
    args = FLAGS.parse_args(argv)
    known = (
        *KERNELS,
        *DELTA_KERNELS,
        *(TIED_KERNELS if args.kda else CHANNEL_KERNELS),
        *SELECTIVE_KERNELS,
        *CONV_KERNELS,
        *SHIFT_KERNELS,
        *OPERAND_KERNELS,
        *NORM_KERNELS,
    )
    known += LOSS_KERNELS
    options.check_known("kernels", args.kernels, known)
    capability = device.compute_capability()
    if capability is None:
        raise UserError("tune times Triton kernels, and JAX sees no GPU here. Run it on a machine with a GPU.")
    arrays, calls = (), {}
    if set(args.kernels) & set(KERNELS):
        arrays = operands(limits.Sizes(1, args.length, 12, args.dim), "bfloat16")
    if set(args.kernels) & set(DELTA_KERNELS):
        calls |= delta_calls()
    if any(kernel.startswith("channel_") for kernel in args.kernels):
        calls |= channel_calls(H=6, K=128, V=128, tied=True) if args.kda else channel_calls()
    end = time.monotonic() + args.seconds
    for kernel in args.kernels:
        if kernel in calls:
            from kernels_pallas.delta_rule.triton import scan as delta
            from kernels_pallas.linear_attention.triton import scan as channel

            table: Any = (channel if kernel.startswith("channel_") else delta).TILES
            key = (kernel.removeprefix("channel_"), 16)
            tiles = (keys_candidates if kernel == "channel_keys" else scan_candidates)(table[key])
            fastest(kernel, table, key, tiles, calls[kernel], end)
        elif kernel in SELECTIVE_KERNELS:
            from kernels_pallas.selective_scan.triton import scan as selective

            key = SELECTIVE_KERNELS[kernel]
            tiles, made = selective_candidates(kernel, selective.TILES[key]), partial(selective_call, kernel)
            fastest(kernel, selective.TILES, key, tiles, made, end)
        elif kernel in CONV_KERNELS:
            from kernels_pallas.short_conv.triton import conv

            made = partial(conv_call, kernel)
            fastest(kernel, conv.TILES, kernel, conv_candidates(conv.TILES[kernel]), made, end)
        elif kernel in SHIFT_KERNELS:
            from kernels_pallas.token_shift.triton import shift

            made = partial(shift_call, kernel)
            fastest(kernel, shift.TILES, kernel, conv_candidates(shift.TILES[kernel]), made, end)
        elif kernel in OPERAND_KERNELS:
            from kernels_pallas.wkv7_operands.triton import operands as wkv7

            key = kernel.removeprefix("operands_")
            tiles, made = operand_candidates(wkv7.TILES[key]), partial(operands_call, kernel)
            fastest(kernel, wkv7.TILES, key, tiles, made, end)
        elif kernel in NORM_KERNELS:
            from kernels_pallas.head_norm.triton import norm

            key = kernel.removeprefix("norm_")
            fastest(kernel, norm.TILES, key, norm_candidates(norm.TILES[key]), partial(norm_call, kernel), end)
        elif kernel in LOSS_KERNELS:
            from kernels_pallas.cross_entropy.triton import loss

            fastest(kernel, loss.TILES, kernel, loss_candidates(loss.TILES[kernel]), loss_call, end)
        else:
            entry = "forward" if kernel == "evaluate" else kernel
            key = (entry, 64 if args.dim <= 64 else 128, True, capability >= 90)
            first = tile_sizes.tiles(entry, args.dim, jnp.dtype("bfloat16"))
            fastest(kernel, tile_sizes.TILES, key, candidates(kernel, first), partial(call, kernel, arrays), end)


if __name__ == "__main__":
    run_command(main)
