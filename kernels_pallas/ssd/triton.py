"""The `triton` backend of Mamba-2's recurrence: launches of triton_kernels.py and triton_grad_kernels.py, tile sizes.

Forward: one walk over the chunks leaves the states at their starts, [B, c, H, N, V] in the dtype of x, then every chunk
makes its outputs. What the backward pass keeps is the inputs and those states, as large as N / Q arrays of x. It walks
back for the states' gradients, then dx and the scores' gradient, then dC and dB; equations in `vjp.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import compat
from kernels_pallas.batching import fold_vmap
from kernels_pallas.chunks import cut, join
from kernels_pallas.ssd import triton_grad_kernels as grads
from kernels_pallas.ssd import triton_kernels as kernels
from kernels_pallas.triton_probe import padded, precision

# Positions per chunk at most, by whether inputs have 16 bits: a tile holds a whole chunk along one axis.
CHUNKS = {True: 128, False: 64}


class Tile(NamedTuple):
    """Rows per program (of the state for "walk"), heads per program, warps, chunks or heads in flight."""

    block: int
    heads: int
    warps: int
    stages: int


# By kernel and bits of the inputs: (head dims up to 64, wider ones). 16-bit ones spill at most 20 bytes, on sm80 or
# sm90; fp32, whose products are three each and hold their operands in registers, spills in "mix", and where V is 128.
TILES = {
    ("walk", 16): (Tile(64, 1, 4, 2), Tile(64, 1, 8, 2)),
    ("mix", 16): (Tile(64, 12, 4, 2), Tile(64, 12, 4, 2)),
    ("scores", 16): (Tile(32, 6, 4, 2), Tile(32, 6, 4, 2)),
    ("across", 16): (Tile(64, 12, 4, 3), Tile(64, 12, 8, 2)),
    ("walk", 32): (Tile(16, 1, 8, 1), Tile(16, 1, 8, 1)),
    ("mix", 32): (Tile(32, 4, 8, 1), Tile(32, 4, 8, 1)),
    ("scores", 32): (Tile(32, 6, 8, 1), Tile(32, 6, 8, 1)),
    ("across", 32): (Tile(32, 12, 8, 1), Tile(32, 12, 8, 1)),
}


def tile(kernel: str, x: Array) -> Tile:
    """The table's entry; the interpreter's is so small that tests see several blocks and groups of heads."""
    bits = 16 if _is_16_bit(x) else 32
    return Tile(16, 2, 4, 1) if compat.is_interpreted() else TILES[kernel, bits][padded(x.shape[-1]) > 64]


def _is_16_bit(x: Array) -> bool:
    return jnp.finfo(x.dtype).bits == 16


def run(x, log_a, b, c, initial, dt: Array | None, *, chunk_size: int) -> tuple[Array, Array]:
    """(y [B, T, H, V], the last state)."""
    chunk = min(chunk_size, CHUNKS[_is_16_bit(x)])
    g_BcHQ = jnp.cumsum(jnp.moveaxis(cut(log_a, chunk), 2, 3), axis=-1)
    dt_BcHQ = None if dt is None else jnp.moveaxis(cut(dt, chunk), 2, 3)
    out: Any = _chunked(x, g_BcHQ, dt_BcHQ, b, c, initial)
    return out


@jax.custom_vjp
def _chunked(x, g_BcHQ, dt_BcHQ, b, c, initial) -> tuple[Array, Array]:
    return _forward(x, g_BcHQ, dt_BcHQ, b, c, initial)[0]


def _forward(x, g, dt, b, c, initial):
    has_dt = dt is not None
    y, last, states = fold_vmap(partial(_run_forward, has_dt=has_dt))(x, g, dt if has_dt else g, b, c, initial)
    return (y, last), (x, g, dt, b, c, states)


def _backward(saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    x, g, dt, b, c, states = saved
    has_dt = dt is not None
    run = fold_vmap(partial(_run_backward, has_dt=has_dt))
    dx, dg, ddt, db, dc, d_initial = run(x, g, dt if has_dt else g, b, c, states, *cotangents)
    return dx, dg, ddt if has_dt else None, db, dc, d_initial


_chunked.defvjp(_forward, _backward)


def _run_forward(x, g, dt, b, c, initial, *, has_dt: bool) -> tuple[Array, Array, Array]:
    states, last, _ = _walk(x, g, dt, b, initial, initial, has_dt=has_dt)
    (y,) = _launch(
        "mix", kernels.mix_kernel, x, g, dt, c, b, states, out=[x], x=x, g=g, n=b, has_dt=has_dt, REVERSE=False
    )
    return y, last, states


def _run_backward(x, g, dt, b, c, states, dy, d_last, *, has_dt: bool) -> tuple[Array, ...]:
    (B, T, H, _), N, (_, n_chunks, _, Q) = x.shape, b.shape[-1], g.shape
    launch = partial(_launch, x=x, g=g, n=b, has_dt=has_dt)
    f32 = partial(jax.ShapeDtypeStruct, dtype=g.dtype)
    behind, d_initial, overlap = _walk(dy, g, dt, c, d_last, states, has_dt=has_dt, reverse=True)
    (dx,) = launch("mix", kernels.mix_kernel, dy, g, dt, b, c, behind, out=[x], REVERSE=True)
    scores, across = tile("scores", x), tile("across", x)
    ddt = g if has_dt else f32((1,))  # what is not written has the size of one entry
    ds, as_query, as_key, ddt_inside = launch(
        "scores",
        grads.scores_grad_kernel,
        *(x, dy, g, dt, b, c),
        out=[f32((B, n_chunks, -(-H // scores.heads), Q, Q)), f32((B, n_chunks, -(-Q // scores.block), H, Q)), g, ddt],
    )
    parts = f32((B, n_chunks, -(-H // across.heads), Q, N))
    run = partial(launch, "across", grads.across_grad_kernel)
    dc, read, _ = run(dy, g, dt, c, states, out=[parts, g, f32((1,))], REST=False)
    db, taken, ddt_across = run(x, g, dt, b, behind, out=[parts, g, ddt], REST=True)
    dg = jnp.sum(as_query, axis=2) + read - as_key - taken
    dg = dg.at[..., -1].add(jnp.sum(taken, axis=-1) + jnp.sum(overlap, axis=-1))
    ds_BcQQ = jnp.sum(ds, axis=2).astype(x.dtype)  # keys first
    product = partial(jnp.einsum, preferred_element_type=g.dtype, precision=jax.lax.Precision.HIGHEST)
    dc = jnp.sum(dc, axis=2) + product("bcji,bcjn->bcin", ds_BcQQ, cut(b, Q))
    db = jnp.sum(db, axis=2) + product("bcji,bcin->bcjn", ds_BcQQ, cut(c, Q))
    return dx, dg, ddt_inside + ddt_across, join(db, T).astype(b.dtype), join(dc, T).astype(c.dtype), d_initial


def _walk(v, g, dt, u, start, other, *, has_dt: bool, reverse: bool = False) -> tuple[Array, ...]:
    """(states, last, overlap) of `walk_kernel`; overlap is of use in reverse only."""
    (B, _, H, V), N, n_chunks = v.shape, u.shape[-1], g.shape[1]
    n_blocks = -(-N // min(tile("walk", v).block, padded(N)))
    out = [
        jax.ShapeDtypeStruct((B, n_chunks, H, N, V), v.dtype),
        start,
        jax.ShapeDtypeStruct((B, n_chunks, H, n_blocks) if reverse else (1,), g.dtype),
    ]
    operands = (v, g, dt, u, start, other)
    return _launch("walk", kernels.walk_kernel, *operands, out=out, x=v, g=g, n=u, has_dt=has_dt, REVERSE=reverse)


def _launch(kind: str, kernel: Any, *arrays, out: list, x, g, n, has_dt: bool, **constants: Any) -> tuple[Array, ...]:
    """A launch of `kernel` over the blocks of what `kind` cuts, for operands shaped like x, g and n (B or C)."""
    (B, T, H, V), N, (_, n_chunks, _, Q) = x.shape, n.shape[-1], g.shape
    entry = tile(kind, x)
    block = min(entry.block, padded(N if kind == "walk" else Q))
    if kind == "walk":
        programs = B * H * -(-N // block)
    else:
        programs = B * n_chunks * -(-Q // block) * -(-H // entry.heads)
        constants["HEADS"] = entry.heads
    return compat.launch(
        kernel,
        *arrays,
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out],
        grid=(programs,),
        num_warps=entry.warps,
        num_stages=entry.stages,
        name=f"ssd_{kind}" + ("_reverse" if constants.get("REVERSE") or constants.get("REST") else ""),
        T=T,
        H=H,
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
