"""Launch the Triton kernels of the selective scan; tile sizes.

If batch x channel blocks fill the GPU, one forward program goes over all of time and keeps the state at every chunk
start. Otherwise time is cut at the chunk starts: a first launch computes every chunk's end state from zero, state_scan
the start states, and a second launch all chunks in parallel, with twice the exponentials. The gradient likewise goes
over all of time, or over enough segments of chunks to fill the GPU. States and sums are float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import loop_vmap
from kernels_pallas.chunks import split_chunks
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.selective_scan.interface import step_sizes
from kernels_pallas.selective_scan.triton import bwd_kernels, fwd_kernels
from kernels_pallas.state_scan.triton.scan import elementwise_share as state_passing
from kernels_pallas.triton import interpreter, runtime


class Tile(NamedTuple):
    """Tile settings for a kernel.

    e: channels per program; warps: warps per program; u: positions per loop step (2, 4 or 8); full: number of warps
    from which time is not cut.
    """

    e: int
    warps: int
    u: int
    full: int = 512
    steps: int = 64  # for scan_bwd: positions between kept states, the chunk of the gradient


# One warp holds a block of channels, with BLOCK_E x N / 32 states per thread. More channels per program share the loads
# of B and C and write fewer parts of their gradients. More positions per step halve the L2 buffer of scan_bwd (25 MB
# for 1,536 programs here) and its traffic. Both need registers: with up to 168 per thread, all programs for 16 x 1,536
# channels are resident on 132 multiprocessors (128 here, 214 with steps of 4).
TILES = {"scan": Tile(16, 1, 4), "needed": Tile(16, 1, 4), "scan_bwd": Tile(16, 1, 2, full=1024, steps=32)}


def tile(kernel: str) -> Tile:
    """Return the kernel's tile; the interpreter's small tile gives several programs."""
    return Tile(4, 1, TILES[kernel].u, full=2, steps=8) if interpreter.is_chosen() else TILES[kernel]


def chunk_steps() -> int:
    """Return the positions per chunk, also for shorter sequences.

    triton 3.6 fails on a loop of two rounds.
    """
    return max(tile("scan_bwd").steps, *(t.u for t in TILES.values()))


# Parts of a sharding rule (batching.py): x, dt, A, B, C and D; `g` names the channels. The gradients of A and D are
# sums over the batch, the gradients of B and C sums over the channels.
_OPERANDS = "b t g, b t g, g n, b t n, b t n, g"


has_softplus = True  # see interface.SelectiveScanOfSoftplus


def forward(
    x_BTE, dt_BTE, A_EN, B_BTN, C_BTN, D_E, initial_BEN, *, chunk_size: int | None, keep: bool, dt_bias_E=None
) -> tuple[Array, Array, Array]:
    """Return (y [B, T, E], last state, chunk-start states [B, c, E, N]).

    The third result is valid only with `keep`.
    """
    del chunk_size  # the tiles fix the chunks
    biases, dims = ((), "") if dt_bias_E is None else ((dt_bias_E,), ", g")
    rule = f"{_OPERANDS}, b g n{dims} -> b t g, b g n" + (", b c g n" if keep else "")
    run = loop_vmap(partial(_forward, keep=keep), rule)
    b, c = B_BTN.astype(jnp.float32), C_BTN.astype(jnp.float32)
    y, last, *kept = run(x_BTE, dt_BTE, A_EN * LOG2_E, b, c, D_E, initial_BEN, *biases)
    return y, last, kept[0] if keep else last


def backward(
    x_BTE, dt_BTE, A_EN, B_BTN, C_BTN, D_E, kept, dy_BTE, d_last_BEN, *, chunk_size: int | None, dt_bias_E=None
) -> tuple[Array, ...]:
    """Return the gradients of x, dt, A, B, C, D, the initial state and any bias."""
    del chunk_size  # the tiles fix the chunks
    biases, dims = ((), "") if dt_bias_E is None else ((dt_bias_E,), ", g")
    rule = f"{_OPERANDS}, b c g n, b t g, b g n{dims} -> b t g, b t g, g n, b t n, b t n, g, b g n{dims}"
    b, c = B_BTN.astype(jnp.float32), C_BTN.astype(jnp.float32)
    run = loop_vmap(_backward, rule)
    dx, ddt, dA, dB, dC, *rest = run(x_BTE, dt_BTE, A_EN * LOG2_E, b, c, D_E, kept, dy_BTE, d_last_BEN, *biases)
    return dx, ddt, dA, dB.astype(B_BTN.dtype), dC.astype(C_BTN.dtype), *rest


def _forward(x, dt, a, b, c, d, initial, bias=None, *, keep: bool) -> tuple[Array, ...]:
    (B, T, E), N = x.shape, a.shape[1]
    block, steps = tile("scan"), chunk_steps()
    n_chunks = -(-T // steps)
    scan = partial(_scan, x, dt, a, b, c, d, bias, steps=steps)
    if B * -(-E // block.e) * block.warps >= block.full or n_chunks == 1:
        y, kept, last = scan(initial[:, None], segments=1, keep=keep)
        return (y, last[:, 0], kept) if keep else (y, last[:, 0])
    start = jnp.zeros((B, n_chunks, E, N), a.dtype)
    _, _, update = scan(start, segments=n_chunks, keep=False, with_y=False)
    # Decay of a whole chunk; after T dt counts as zero, as in the kernel.
    total_BcE = jnp.sum(split_chunks(step_sizes(dt, bias), steps), axis=2)
    starts, last = state_passing(jnp.exp2(total_BcE[..., None] * a), update, initial, reverse=False)
    y, _, _ = scan(starts, segments=n_chunks, keep=False)
    return (y, last, starts) if keep else (y, last)


def _scan(x, dt, a, b, c, d, bias, start, *, steps: int, segments: int, keep: bool, with_y: bool = True) -> tuple:
    (B, T, E), N = x.shape, a.shape[1]
    block, n_chunks = tile("scan"), -(-T // steps)
    return runtime.launch(
        fwd_kernels.scan_kernel,
        x,
        dt,
        a,
        b,
        c,
        d,
        d if bias is None else bias,
        start,
        # Outputs that the kernel does not write have one entry.
        out_shape=[
            jax.ShapeDtypeStruct(x.shape if with_y else (1,), x.dtype),
            jax.ShapeDtypeStruct((B, n_chunks, E, N) if keep else (1,), a.dtype),
            jax.ShapeDtypeStruct((B, segments, E, N), a.dtype),
        ],
        grid=(B * segments * -(-E // block.e),),
        num_warps=block.warps,
        name="selective_scan" if with_y else "selective_scan_ends",
        STEPS=n_chunks * steps // segments,
        EVERY=steps,
        WITH_Y=with_y,
        KEEP=keep,
        SOFTPLUS=bias is not None,
        **_sizes(x, a, block),
    )


def _sizes(x: Array, a: Array, block: Tile) -> dict[str, Any]:
    """Return the constants of all kernels; lane counts: see tile_kernels.py."""
    N, (_, T, E) = a.shape[1], x.shape
    NP = max(2, 1 << (N - 1).bit_length())
    lanes_n = max(1, NP // 4)  # threads load 16 bytes at a time
    lanes = {"LANES_E": min(block.e, 32 * block.warps // lanes_n), "LANES_N": lanes_n}
    return {"T": T, "E": E, "N": N, "NP": NP, "BLOCK_E": block.e, "U": block.u, **lanes}


def _backward(x, dt, a, b, c, d, kept, dy, d_last, bias=None) -> tuple[Array, ...]:
    (B, T, E), N = x.shape, a.shape[1]
    steps, block = chunk_steps(), tile("scan_bwd")
    n_chunks, n_blocks, sizes = -(-T // steps), -(-E // block.e), _sizes(x, a, block)
    chunks = -(-n_chunks // max(1, block.full // (B * n_blocks * block.warps)))  # chunks per segment
    segments = -(-n_chunks // chunks)
    of_segments = jax.ShapeDtypeStruct((B, segments, E, N), a.dtype)
    d_ends = d_last[:, None]
    if segments > 1:
        first = tile("needed")
        needed, decay = runtime.launch(
            bwd_kernels.needed_kernel,
            dt,
            a,
            c,
            d if bias is None else bias,
            dy,
            out_shape=[of_segments, of_segments],
            grid=(B * segments * -(-E // first.e),),
            num_warps=first.warps,
            name="selective_scan_needed",
            STEPS=chunks * steps,
            SOFTPLUS=bias is not None,
            **_sizes(x, a, first),
        )
        d_ends, _ = state_passing(decay, needed, d_last, reverse=True)
    parts = jax.ShapeDtypeStruct((B, n_blocks, T, N), a.dtype)
    programs = B * segments * n_blocks
    dx, ddt, da, db, dc, dd, d_bias, d_starts, _ = runtime.launch(
        bwd_kernels.scan_bwd_kernel,
        x,
        dt,
        a,
        b,
        c,
        d,
        d if bias is None else bias,
        dy,
        kept,
        d_ends,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(dt.shape, dt.dtype),
            of_segments,
            parts,
            parts,
            jax.ShapeDtypeStruct((B, segments, E), a.dtype),
            jax.ShapeDtypeStruct((1,) if bias is None else (B, segments, E), a.dtype),
            of_segments,
            jax.ShapeDtypeStruct((programs, steps // block.u, block.e, sizes["NP"]), a.dtype),
        ],
        grid=(programs,),
        num_warps=block.warps,
        name="selective_scan_bwd",
        STEPS=steps,
        CHUNKS=chunks,
        SOFTPLUS=bias is not None,
        **sizes,
    )
    db, dc = (jnp.sum(part, axis=1) for part in (db, dc))
    return (
        dx,
        ddt,
        jnp.sum(da, axis=(0, 1)),
        db,  # float32: channels on other devices may have to be added
        dc,
        jnp.sum(dd, axis=(0, 1)),
        d_starts[:, 0],
        *([] if bias is None else [jnp.sum(d_bias, axis=(0, 1))]),
    )
