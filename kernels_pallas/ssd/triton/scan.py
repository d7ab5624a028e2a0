"""Launch the Triton kernels of SSD; the custom VJP and the tile sizes.

Forward: one pass over the chunks stores the states at their starts, [B, c, H, N, V] in the dtype of x; then all chunks
compute their outputs. The backward pass keeps the inputs and these states, N / Q times the size of x. It computes the
state gradients back over the chunks, then all other gradients. If heads share B and C, dx, the score gradient, dC and
dB are separate launches, which sum over heads. If each head has its own B and C, one launch
writes each gradient once, in the dtype of its operand. Equations: `api.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.ssd.triton import bwd_kernels, fwd_kernels
from kernels_pallas.state_scan.triton.segments import PROGRAMS, SHORTEST
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded, precision

# Most positions per chunk, by input bits: a tile holds a whole chunk on one axis. With B and C per head the backward
# kernel also holds a chunk's scores and a score gradient: (head dims up to 64, wider ones).
CHUNKS = {16: 128, 32: 64}
CHUNKS_PER_HEAD = {16: (64, 64), 32: (32, 16)}


class Tile(NamedTuple):
    """Tile settings for a kernel.

    block: rows per program (state rows for "state_passing"; for "per_head_bwd", columns of B and C per step); heads:
    heads per program; warps: warps per program; stages: chunks, heads or steps in flight.
    """

    block: int
    heads: int
    warps: int
    stages: int


# Keyed by kernel and input bits: (head dims up to 64, wider ones). 16-bit entries spill at most 56 bytes on sm80 and
# sm90. fp32, with three TF32 products each and operands in registers, spills in "chunk_scan" and "per_head_bwd", and if
# V is 128.
TILES = {
    ("state_passing", 16): (Tile(64, 1, 4, 2), Tile(64, 1, 8, 2)),
    ("chunk_scan", 16): (Tile(64, 12, 4, 2), Tile(64, 12, 4, 2)),
    ("scores_bwd", 16): (Tile(32, 6, 4, 2), Tile(32, 6, 4, 2)),
    ("states_bwd", 16): (Tile(64, 12, 4, 3), Tile(64, 12, 8, 2)),
    ("per_head_bwd", 16): (Tile(32, 1, 4, 2), Tile(32, 1, 8, 2)),
    ("state_passing", 32): (Tile(16, 1, 8, 1), Tile(16, 1, 8, 1)),
    ("chunk_scan", 32): (Tile(32, 4, 8, 1), Tile(32, 4, 8, 1)),
    ("scores_bwd", 32): (Tile(32, 6, 8, 1), Tile(32, 6, 8, 1)),
    ("states_bwd", 32): (Tile(32, 12, 8, 1), Tile(32, 12, 8, 1)),
    ("per_head_bwd", 32): (Tile(32, 1, 8, 1), Tile(32, 1, 4, 1)),
}


def tile(kernel: str, x: Array) -> Tile:
    """Return the kernel's tile; the interpreter's small tile gives several programs."""
    return Tile(16, 2, 4, 1) if interpreter.is_chosen() else TILES[kernel, _bits(x)][_is_wide(x)]


def _heads(kernel: str, x: Array, b: Array) -> int:
    """Return the heads per program: 1 if each head has its own B and C."""
    return tile(kernel, x).heads if b.ndim == 3 else 1


def _bits(x: Array) -> int:
    return jnp.finfo(x.dtype).bits


def _is_wide(x: Array) -> bool:
    return padded(x.shape[-1]) > 64


def run(
    x_BTHV: Array,
    log_a_BTH: Array,
    b_BTN: Array,
    c_BTN: Array,
    initial_BHNV: Array,
    dt_BTH: Array | None,
    *,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Return (y [B, T, H, V], last state)."""
    bits = _bits(x_BTHV)
    chunk = min(chunk_size, CHUNKS[bits] if b_BTN.ndim == 3 else CHUNKS_PER_HEAD[bits][_is_wide(x_BTHV)])
    g_BcHQ = jnp.cumsum(jnp.moveaxis(split_chunks(log_a_BTH, chunk), 2, 3), axis=-1)
    dt_BcHQ = None if dt_BTH is None else jnp.moveaxis(split_chunks(dt_BTH, chunk), 2, 3)
    out: Any = _chunked(x_BTHV, g_BcHQ, dt_BcHQ, b_BTN, c_BTN, initial_BHNV)
    return out


def _rule(b: Array) -> tuple[str, str]:
    """Return the dims of (x, g, dt, B, C) and of B for a sharding rule (batching.py).

    `g` names the heads. Gradients of a B and C that heads share are sums over the heads.
    """
    dims = "b t n" if b.ndim == 3 else "b t g n"
    return f"b t g v, b c g q, b c g q, {dims}, {dims}", dims


@jax.custom_vjp
def _chunked(x, g_BcHQ, dt_BcHQ, b, c, initial) -> tuple[Array, Array]:
    return _forward(x, g_BcHQ, dt_BcHQ, b, c, initial)[0]


def _forward(x, g, dt, b, c, initial):
    has_dt = dt is not None
    rule = f"{_rule(b)[0]}, b g n v -> b t g v, b g n v, b c g n v"
    run = fold_vmap(partial(_run_forward, has_dt=has_dt), rule)
    y, last, states = run(x, g, dt if has_dt else g, b, c, initial)
    return (y, last), (x, g, dt, b, c, states)


def _backward(saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    x, g, dt, b, c, states = saved
    has_dt = dt is not None
    operands, dims = _rule(b)
    results = f"b t g v, b c g q, {dims}, {dims}, b g n v" + (", b c g q" if has_dt else "")
    run = fold_vmap(partial(_run_backward, has_dt=has_dt), f"{operands}, b c g n v, b t g v, b g n v -> {results}")
    dx, dg, db, dc, d_initial, *ddt = run(x, g, dt if has_dt else g, b, c, states, *cotangents)
    return dx, dg, ddt[0] if has_dt else None, db.astype(b.dtype), dc.astype(c.dtype), d_initial


_chunked.defvjp(_forward, _backward)


def _run_forward(x, g, dt, b, c, initial, *, has_dt: bool) -> tuple[Array, Array, Array]:
    states, last, _ = _pass_states(x, g, dt, b, initial, initial, has_dt=has_dt)
    launch = partial(_launch, "chunk_scan", fwd_kernels.chunk_scan_kernel, x=x, g=g, n=b, has_dt=has_dt)
    (y,) = launch(x, g, dt, c, b, states, out=[x], REVERSE=False)
    return y, last, states


def _run_backward(x, g, dt, b, c, states, dy, d_last, *, has_dt: bool) -> tuple[Array, ...]:
    shared = b.ndim == 3
    other = states if shared else d_last  # a placeholder, not read
    passed = _pass_states(dy, g, dt, c, d_last, other, has_dt=has_dt, reverse=True, overlap=shared)
    d_states, d_initial, overlap = passed
    operands = (x, dy, g, dt, b, c, states, d_states)
    if shared:
        dx, dg, db, dc, *ddt = _gradients_of_shared(*operands, overlap, has_dt=has_dt)
    else:
        kernel = bwd_kernels.per_head_bwd_kernel
        ddt = g if has_dt else jax.ShapeDtypeStruct((1,), g.dtype)  # one entry: not written
        out = [x, b, c, g, ddt]
        dx, db, dc, dg, *ddt = _launch("per_head_bwd", kernel, *operands, out=out, x=x, g=g, n=b, has_dt=has_dt)
    return dx, dg, db, dc, d_initial, *(ddt if has_dt else [])


def _gradients_of_shared(x, dy, g, dt, b, c, states, d_states, overlap, *, has_dt: bool) -> tuple[Array, ...]:
    """Return dx, dg, db, dc and, with dt, ddt for a B and C that heads share."""
    (B, T, H, _), N, (_, n_chunks, _, Q) = x.shape, b.shape[-1], g.shape
    launch = partial(_launch, x=x, g=g, n=b, has_dt=has_dt)
    f32 = partial(jax.ShapeDtypeStruct, dtype=g.dtype)
    (dx,) = launch("chunk_scan", fwd_kernels.chunk_scan_kernel, dy, g, dt, b, c, d_states, out=[x], REVERSE=True)
    ddt = g if has_dt else f32((1,))  # one entry: not written
    n_groups, n_blocks = -(-H // _heads("scores_bwd", x, b)), -(-Q // tile("scores_bwd", x).block)
    ds, as_query, as_key, ddt_intra = launch(
        "scores_bwd",
        bwd_kernels.scores_bwd_kernel,
        *(x, dy, g, dt, b, c),
        out=[f32((B, n_chunks, n_groups, Q, Q)), f32((B, n_chunks, n_blocks, H, Q)), g, ddt],
    )
    parts = f32((B, n_chunks, -(-H // _heads("states_bwd", x, b)), Q, N))
    run = partial(launch, "states_bwd", bwd_kernels.states_bwd_kernel)
    dc, read, _ = run(dy, g, dt, c, states, out=[parts, g, f32((1,))], FOR_B=False)
    db, taken, ddt_inter = run(x, g, dt, b, d_states, out=[parts, g, ddt], FOR_B=True)
    dg = jnp.sum(as_query, axis=2) + read - as_key - taken
    dg = dg.at[..., -1].add(jnp.sum(taken, axis=-1) + jnp.sum(overlap, axis=-1))
    product = partial(jnp.einsum, preferred_element_type=g.dtype, precision=jax.lax.Precision.HIGHEST)
    ds = jnp.sum(ds, axis=2).astype(x.dtype)  # keys first
    dc = jnp.sum(dc, axis=2) + product("bcji,bcjn->bcin", ds, split_chunks(b, Q))
    db = jnp.sum(db, axis=2) + product("bcji,bcin->bcjn", ds, split_chunks(c, Q))
    db, dc = join_chunks(db, T), join_chunks(dc, T)  # float32: heads on other devices may have to be added
    return dx, dg, db, dc, *([ddt_intra + ddt_inter] if has_dt else [])


def _pass_states(
    v, g, dt, u, start, other, *, has_dt: bool, reverse: bool = False, overlap: bool = False
) -> tuple[Array, ...]:
    """Return (states, last, overlaps) of `state_passing_kernel`.

    The overlaps are valid only with `overlap`, in reverse. The kernel has one program per batch entry, head and row
    block, which leaves a GPU mostly idle for a single long sequence. Time is then cut into segments: a first pass
    computes each segment's end state from zero, these give the states between segments, and a second pass starts from
    them. For one sequence of 102,400 tokens with 24 heads, a layer's forward and backward fell from 5.8 to 3.8 ms
    (lab/log/kernels.md).
    """
    (B, T, H, V), N, (_, n_chunks, _, Q) = v.shape, u.shape[-1], g.shape
    n_blocks = -(-N // min(tile("state_passing", v).block, padded(N)))
    n_segments = segments(B * H * n_blocks, n_chunks) if n_chunks * Q == T else 1

    def cut(x: Array) -> Array:
        return x if x.ndim < 3 else x.reshape(B * n_segments, x.shape[1] // n_segments, *x.shape[2:])

    def launch(start_BHNV: Array, *, keep: bool) -> tuple[Array, ...]:
        rows, chunks = B * n_segments, n_chunks // n_segments
        nothing = jax.ShapeDtypeStruct((1,), g.dtype)  # outputs that the kernel does not write have one entry
        out = [
            jax.ShapeDtypeStruct((rows, chunks, H, N, V), v.dtype) if keep else nothing,
            start_BHNV,
            jax.ShapeDtypeStruct((rows, chunks, H, n_blocks), g.dtype) if keep and overlap else nothing,
        ]
        operands = [cut(v), cut(g), cut(dt), cut(u), start_BHNV, cut(other) if overlap else other]
        run = partial(_launch, "state_passing", fwd_kernels.state_passing_kernel, x=operands[0], g=operands[1])
        modes = {"REVERSE": reverse, "KEEP": keep, "OVERLAP": keep and overlap}
        return run(*operands, n=operands[3], has_dt=has_dt, out=out, **modes)

    if n_segments == 1:
        return launch(start, keep=True)
    _, lasts, _ = launch(jnp.zeros((B * n_segments, *start.shape[1:]), start.dtype), keep=False)
    log_decay_BsH = jnp.sum(g[..., -1].reshape(B, n_segments, -1, H), axis=2)
    starts = _between_segments(lasts.reshape(B, n_segments, H, N, V), log_decay_BsH, start, reverse=reverse)
    states, lasts, overlaps = launch(starts.reshape(-1, H, N, V), keep=True)
    last = lasts.reshape(B, n_segments, H, N, V)[:, 0 if reverse else -1]
    states = states.reshape(B, n_chunks, H, N, V)
    return states, last, overlaps.reshape(B, n_chunks, H, n_blocks) if overlap else overlaps


def segments(n_programs: int, n_chunks: int) -> int:
    """Return the number of segments for passes with `n_programs` per segment."""
    enough, shortest = (24, 1) if interpreter.is_chosen() else (PROGRAMS, SHORTEST)
    most = min(enough // n_programs, n_chunks // shortest)
    # Segments take two passes, so two segments would gain nothing.
    return next((n for n in range(most, 2, -1) if n_chunks % n == 0), 1)


def _between_segments(lasts_BsHNV: Array, log_decay_BsH: Array, start_BHNV: Array, *, reverse: bool) -> Array:
    """Return the state at the start of each segment, [B, s, H, N, V].

    Computed from the end states that start from zero, one after the other: differences of summed log decays would
    cancel where the sums are large.
    """
    decay_BsHNV = jnp.exp(log_decay_BsH)[..., None, None]
    n_segments = lasts_BsHNV.shape[1]
    order = range(n_segments - 1, 0, -1) if reverse else range(n_segments - 1)
    starts = [start_BHNV]
    for s in order:
        starts.append(decay_BsHNV[:, s] * starts[-1] + lasts_BsHNV[:, s])
    return jnp.stack(starts[::-1] if reverse else starts, axis=1)


def _launch(kind: str, kernel: Any, *arrays, out: list, x, g, n, has_dt: bool, **constants: Any) -> tuple[Array, ...]:
    """Launch `kernel` over the blocks of its kind.

    x, g and n (B or C) give the shapes of the operands.
    """
    (B, T, H, V), N, (_, n_chunks, _, Q) = x.shape, n.shape[-1], g.shape
    entry = tile(kind, x)
    block = min(entry.block, padded(N if kind in ("state_passing", "per_head_bwd") else Q))
    if kind == "per_head_bwd":
        programs = B * n_chunks * H
    elif kind == "state_passing":
        programs = B * H * -(-N // block)
    else:
        constants["HEADS"] = _heads(kind, x, n)
        programs = B * n_chunks * -(-Q // block) * -(-H // constants["HEADS"])
    return runtime.launch(
        kernel,
        *arrays,
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out],
        grid=(programs,),
        num_warps=entry.warps,
        num_stages=entry.stages,
        name=f"ssd_{kind}" + ("_reverse" if constants.get("REVERSE") or constants.get("FOR_B") else ""),
        T=T,
        H=H,
        BC=1 if n.ndim == 3 else H,
        N=N,
        V=V,
        NP=padded(N),
        VP=padded(V),
        Q=Q,
        QP=padded(Q),
        BLOCK=block,
        WITH_DT=has_dt,
        BOUNDED=T % Q != 0 or padded(Q) != Q,
        PRECISION=precision(x.dtype),
        STAGES=entry.stages,
        **constants,
    )
