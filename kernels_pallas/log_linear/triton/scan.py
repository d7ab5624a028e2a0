"""Launch the Triton kernels of log-linear attention; the custom VJP and the tile sizes.

Forward: one pass over the chunks stores a state per chunk, a node of a Fenwick tree; then all chunks compute their
outputs. The backward pass keeps the inputs and these states, N / Q times the size of x. It computes the state gradients
back over the chunks, then dx and the score gradient in one kernel, then dC, dm and dB. Equations: `api.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import device
from kernels_pallas.batching import fold_vmap
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.log_linear.triton import LEAST_CHUNK, bwd_kernels, fwd_kernels
from kernels_pallas.ssd.triton.bwd_kernels import states_bwd_kernel
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded, precision

# Most positions per chunk, by whether inputs have 16 bits: a tile holds a whole chunk on one axis.
CHUNKS = {True: 64, False: 32}
MANY_LEVELS = 6  # with more levels a program of a pass over the chunks has half the rows per level


class Tile(NamedTuple):
    """Tile settings for a kernel.

    block: rows per program (state rows for "states" and "gradients", state entries for "combine"); heads: heads per
    program; warps: warps per program; stages: chunks or heads in flight.
    """

    block: int
    heads: int
    warps: int
    stages: int


# Keyed by kernel and input bits: (head dims up to 64, wider ones).
TILES = {
    ("states", 16): (Tile(64, 1, 8, 2), Tile(32, 1, 8, 2)),
    ("gradients", 16): (Tile(128, 1, 8, 2), Tile(64, 1, 8, 2)),
    ("combine", 16): (Tile(2048, 1, 4, 1), Tile(2048, 1, 4, 1)),
    ("chunk_scan", 16): (Tile(64, 6, 4, 2), Tile(32, 12, 8, 2)),
    ("inside_bwd", 16): (Tile(64, 12, 4, 2), Tile(64, 6, 4, 1)),
    ("reads_bwd", 16): (Tile(64, 12, 4, 3), Tile(32, 12, 8, 2)),
    ("states_bwd", 16): (Tile(64, 12, 4, 3), Tile(64, 12, 8, 2)),
    ("states", 32): (Tile(16, 1, 8, 1), Tile(16, 1, 8, 1)),
    ("gradients", 32): (Tile(16, 1, 8, 1), Tile(16, 1, 8, 1)),
    ("combine", 32): (Tile(1024, 1, 4, 1), Tile(1024, 1, 4, 1)),
    ("chunk_scan", 32): (Tile(32, 4, 8, 1), Tile(32, 4, 8, 1)),
    ("inside_bwd", 32): (Tile(32, 6, 8, 1), Tile(32, 6, 8, 1)),
    ("reads_bwd", 32): (Tile(32, 12, 8, 1), Tile(32, 12, 8, 1)),
    ("states_bwd", 32): (Tile(32, 12, 8, 1), Tile(32, 12, 8, 1)),
}

# On an A100, the tiles above spill more in these.
AMPERE = {
    ("inside_bwd", 16): (Tile(64, 12, 4, 1), Tile(64, 6, 4, 1)),
    ("reads_bwd", 16): (Tile(64, 12, 8, 2), Tile(32, 12, 8, 2)),
}


def tile(kernel: str, x: Array) -> Tile:
    """Return the kernel's tile; the interpreter's small tile gives several programs."""
    if interpreter.is_chosen():
        return Tile(64 if kernel == "combine" else 16, 2, 4, 1)
    is_ampere = (device.compute_capability() or device.AMPERE) < device.HOPPER
    tiles = TILES | AMPERE if is_ampere else TILES
    return tiles[kernel, 16 if _is_16_bit(x) else 32][padded(x.shape[-1]) > 64]


def _is_16_bit(x: Array) -> bool:
    return jnp.finfo(x.dtype).bits == 16


def run(x_BTHV: Array, log_a_BTH: Array, b_BTN: Array, c_BTN: Array, m_BTHL: Array, *, chunk_size: int) -> Array:
    """Return y [B, T, H, V]."""
    most = min(chunk_size, CHUNKS[_is_16_bit(x_BTHV)])
    chunk = max(LEAST_CHUNK, min(1 << (most.bit_length() - 1), padded(x_BTHV.shape[1])))
    g_BcHQ = jnp.cumsum(jnp.moveaxis(split_chunks(log_a_BTH, chunk), 2, 3), axis=-1)
    m_BcHLQ = jnp.moveaxis(split_chunks(m_BTHL, chunk), 2, 4)
    out: Any = _chunked(x_BTHV, g_BcHQ, _sums(g_BcHQ[..., -1]), m_BcHLQ, b_BTN, c_BTN)
    return out


def n_levels(n_chunks: int) -> int:
    """Return the number of bits of a chunk's number, at least 1."""
    return max(1, (n_chunks - 1).bit_length())


def _sums(total_BcH: Array, *, later: bool = False) -> Array:
    """Return the summed log decays of the earlier chunks in each aligned block of 2^k chunks, [B, c, H, k].

    With `later`, of the later chunks. These are products with ones and zeros: differences of running sums would cancel
    where the sums are large.
    """
    chunk = jnp.arange(total_BcH.shape[1])
    bit_k11 = jnp.arange(n_levels(len(chunk)))[:, None, None]
    is_other_cc = chunk > chunk[:, None] if later else chunk < chunk[:, None]
    mask_kcc = ((chunk[:, None] >> bit_k11 == chunk >> bit_k11) & is_other_cc).astype(total_BcH.dtype)
    return jnp.einsum("kct,bth->bchk", mask_kcc, total_BcH, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def _chunked(x, g_BcHQ, reads_BcHk, m_BcHLQ, b, c) -> Array:
    return _forward(x, g_BcHQ, reads_BcHk, m_BcHLQ, b, c)[0]


# Parts of a sharding rule (batching.py): x, g, reads, m, b and c. `g` names the heads; gradients of b and c are sums
# over the heads.
_RULE = "b t g v, b c g q, b c g k, b c g l q, b t n, b t n"


def _forward(*operands: Array) -> tuple[Array, tuple]:
    y, states = fold_vmap(_run_forward, f"{_RULE} -> b t g v, b c g n v")(*operands)
    return y, (*operands, states)


def _backward(saved: tuple, dy: Array) -> tuple:
    *_, b, c, _ = saved
    run = fold_vmap(_run_backward, f"{_RULE}, b c g n v, b t g v -> {_RULE}")
    *gradients, db, dc = run(*saved, dy)
    return *gradients, db.astype(b.dtype), dc.astype(c.dtype)


_chunked.defvjp(_forward, _backward)


def _run_forward(x, g, reads, m, b, c) -> tuple[Array, Array]:
    (B, _, H, V), n_chunks = x.shape, g.shape[1]
    launch = partial(_launch, x=x, g=g, m=m, N=b.shape[-1])
    (states,) = launch("states", fwd_kernels.states_kernel, x, g, b, out=[((B, n_chunks, H, b.shape[-1], V), x.dtype)])
    (y,) = launch(
        "chunk_scan", fwd_kernels.chunk_scan_kernel, *(x, g, reads, m, c, b, states), out=[(x.shape, x.dtype)]
    )
    return y, states


def _run_backward(x, g, reads, m, b, c, states, dy) -> tuple[Array, ...]:
    (B, T, H, _), N, (_, n_chunks, _, L, Q), K = x.shape, b.shape[-1], m.shape, reads.shape[-1]
    launch, f32 = partial(_launch, x=x, g=g, m=m, N=N), g.dtype
    like_states, ends = (states.shape, states.dtype), g[..., -1]
    (d_read,) = launch("gradients", bwd_kernels.gradients_kernel, dy, g, m, c, out=[like_states])
    merged = ((*reads.shape, -(-N * x.shape[-1] // tile("combine", x).block)), f32)
    operands = (reads, _sums(ends, later=True), ends, d_read, states)
    d_states, merged = launch("combine", bwd_kernels.combine_kernel, *operands, out=[like_states, merged])
    n_intra = min(Q.bit_length(), L)
    dx, ds, as_key, dm_intra = launch(
        "inside_bwd",
        bwd_kernels.inside_bwd_kernel,
        *(x, dy, g, m, b, c, d_states),
        out=[
            (x.shape, x.dtype),
            ((B, n_chunks, -(-H // tile("inside_bwd", x).heads), Q, Q), f32),
            (g.shape, f32),
            ((*g.shape[:3], n_intra, Q), f32),
        ],
    )
    part = ((B, n_chunks, -(-H // tile("reads_bwd", x).heads), Q, N), f32)
    operands = (dy, g, reads, m, c, states)
    dc, dm_reads = launch("reads_bwd", bwd_kernels.reads_bwd_kernel, *operands, out=[part, ((*g.shape[:3], K, Q), f32)])
    part = ((B, n_chunks, -(-H // tile("states_bwd", x).heads), Q, N), f32)
    db, taken, _ = launch(
        "states_bwd", states_bwd_kernel, x, g, g, b, d_states, out=[part, (g.shape, f32), ((1,), f32)]
    )

    # Level weights: one gradient by level within chunks and one by bit of the chunk.
    at = [min(Q.bit_length() + k, L - 1) for k in range(K)]
    parts = [[dm_intra[:, :, :, i]] if i < n_intra else [] for i in range(L)]
    for k, i in enumerate(at):
        parts[i].append(dm_reads[:, :, :, k])
    dm = jnp.stack([sum(p[1:], p[0]) if p else jnp.zeros_like(g) for p in parts], axis=3)
    w_BcHkQ = dm_reads * jnp.stack([m[:, :, :, i] for i in at], axis=3)
    merged_BcHk = jnp.sum(merged, axis=-1)
    dreads = jnp.sum(w_BcHkQ, axis=-1) + merged_BcHk
    as_query = jnp.sum((dm_intra * m[:, :, :, :n_intra])[:, :, :, 1:], axis=3) + jnp.sum(w_BcHkQ, axis=3)
    dg = as_query - as_key - taken
    dg = dg.at[..., -1].add(jnp.sum(taken, axis=-1) + jnp.sum(merged_BcHk, axis=-1))
    product = partial(jnp.einsum, preferred_element_type=f32, precision=jax.lax.Precision.HIGHEST)
    ds = jnp.sum(ds, axis=2).astype(x.dtype)  # queries first
    dc = jnp.sum(dc, axis=2) + product("bcij,bcjn->bcin", ds, split_chunks(b, Q))
    db = jnp.sum(db, axis=2) + product("bcij,bcin->bcjn", ds, split_chunks(c, Q))
    # float32: heads on other devices may have to be added
    return dx, dg, dreads, dm, join_chunks(db, T), join_chunks(dc, T)


def _block(kernel: str, x: Array, N: int, levels: int) -> int:
    """Return the state rows per program of a pass over the chunks, which holds a state per level."""
    block, is_many = tile(kernel, x).block, kernel == "states" and levels > MANY_LEVELS
    return min(block // 2 if is_many and block > 16 else block, padded(N))


def _launch(kind: str, kernel: Any, *arrays, out: list, x, g, m, N: int) -> tuple[Array, ...]:
    """Launch `kernel` over the blocks of its kind.

    x, g, m and N give the shapes of the operands.
    """
    (B, T, H, V), (_, n_chunks, _, L, Q) = x.shape, m.shape
    entry, K, first = tile(kind, x), n_levels(n_chunks), Q.bit_length()
    heads, block = entry.heads, min(entry.block, Q)
    if kind in ("states", "gradients"):
        block = _block(kind, x, N, K)
        programs = B * H * -(-N // block) * (K if kind == "gradients" else 1)
    elif kind == "combine":
        block = entry.block
        programs = B * n_chunks * H * -(-N * V // block)
    elif kind == "inside_bwd":
        programs = B * n_chunks * -(-H // heads)
    else:
        programs = B * n_chunks * (Q // block) * -(-H // heads)
    constants: dict[str, Any] = {"L": L, "LEVELS": K, "INTRA": min(first, L), "FIRST": first}
    if kind == "states_bwd":
        constants = {"BC": 1, "QP": Q, "WITH_DT": False, "FOR_B": True}
    return runtime.launch(
        kernel,
        *arrays,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out],
        grid=(programs,),
        num_warps=entry.warps,
        num_stages=entry.stages,
        name=f"log_linear_{kind}",
        T=T,
        H=H,
        N=N,
        V=V,
        NP=padded(N),
        VP=padded(V),
        Q=Q,
        BLOCK=block,
        HEADS=heads,
        BOUNDED=T % Q != 0,
        PRECISION=precision(x.dtype),
        STAGES=entry.stages,
        **constants,
    )
