"""Launch the Triton kernels of the delta rule; the custom VJP and the tile sizes.

Forward: the inverses X of all chunks [B, T, H, C], the states at the chunk starts [B, c, H, K, V], then the outputs. X
and the states have the dtype of q. Few sequences are cut into time segments, whose states take two launches
(state_scan/triton/segments.py). The backward pass keeps the inputs, X and the states. It computes the state gradients
back over the chunks, then the input gradients. Equations: `delta_rule/api.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas.batching import fold_vmap
from kernels_pallas.chunks import split_chunks
from kernels_pallas.delta_rule.triton import bwd_kernels, fwd_kernels
from kernels_pallas.state_scan.triton import segments
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import block_of, longest_chunk, padded, precision


class Tile(NamedTuple):
    """Tile settings for a kernel.

    block: most value columns per block; warps: warps per program; stages: blocks or chunks in flight.
    """

    block: int
    warps: int
    stages: int


# Keyed by kernel and input bits. 16-bit entries are the fastest of 12 settings on one H200 at Gated DeltaNet's sizes,
# except `rows` and kernels where more stages gained little (lab/log/kernels.md). fp32 spills, most at K = 128: each
# product is three TF32 products with operands in registers.
TILES = {
    ("solve", 16): Tile(64, 1, 1),
    ("state", 16): Tile(32, 4, 2),
    ("out", 16): Tile(64, 4, 1),
    ("dstate", 16): Tile(64, 4, 1),
    ("rows", 16): Tile(64, 8, 1),  # 2 stages give wrong results on Hopper (Triton 3.6): a race
    ("columns", 16): Tile(64, 4, 1),
    ("solve", 32): Tile(16, 1, 1),
    ("state", 32): Tile(16, 4, 1),
    ("out", 32): Tile(16, 4, 1),
    ("dstate", 32): Tile(16, 4, 1),
    ("rows", 32): Tile(16, 4, 1),
    ("columns", 32): Tile(16, 4, 1),
}


def tile(kernel: str, dtype: Any) -> Tile:
    """Return the kernel's tile; the interpreter's small tile gives several blocks."""
    return Tile(16, 4, 1) if interpreter.is_chosen() else TILES[kernel, jnp.finfo(dtype).bits]


def run(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    beta_BTH: Array,
    log_g_BTH: Array | None,
    initial_BHKV: Array,
    *,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Return (o [B, T, H, V], last state)."""
    chunk = min(longest_chunk(q_BTHK.dtype), padded(min(chunk_size, q_BTHK.shape[1])))
    beta_BcHC = jnp.moveaxis(split_chunks(beta_BTH, chunk), 2, 3)
    g_BcHC = None
    if log_g_BTH is not None:
        g_BcHC = jnp.cumsum(jnp.moveaxis(split_chunks(log_g_BTH, chunk), 2, 3), axis=-1)
    out: Any = _chunked(q_BTHK, k_BTHK, v_BTHV, beta_BcHC, g_BcHC, initial_BHKV)
    return out


# Part of a sharding rule (batching.py): q, k, v, beta, and g (beta again without decay); `g` names the heads.
_OPERANDS = "b t g k, b t g k, b t g v, b c g q, b c g q"


@jax.custom_vjp
def _chunked(q, k, v, beta_BcHC, g_BcHC, initial) -> tuple[Array, Array]:
    return _forward(q, k, v, beta_BcHC, g_BcHC, initial)[0]


def _forward(q, k, v, beta, g, initial):
    has_gate = g is not None
    results = "b t g v, b g k v, b t g q, b c g k v"
    run = fold_vmap(partial(_run_forward, has_gate=has_gate), f"{_OPERANDS}, b g k v -> {results}")
    o, last, x, states = run(q, k, v, beta, g if has_gate else beta, initial)
    # Same names as in the xla backend: one remat policy keeps these values for both backends.
    x, states = checkpoint_name(x, "chunk_inverse"), checkpoint_name(states, "chunk_states")
    return (o, last), (q, k, v, beta, g, x, states)


def _backward(saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    q, k, v, beta, g, x, states = saved
    has_gate = g is not None
    operands = f"{_OPERANDS}, b t g q, b c g k v, b t g v, b g k v"
    results = "b t g k, b t g k, b t g v, b c g q, b g k v" + (", b c g q" if has_gate else "")
    run = fold_vmap(partial(_run_backward, has_gate=has_gate), f"{operands} -> {results}")
    dq, dk, dv, dbeta, d_initial, *dg = run(q, k, v, beta, g if has_gate else beta, x, states, *cotangents)
    return dq, dk, dv, dbeta, dg[0] if has_gate else None, d_initial


_chunked.defvjp(_forward, _backward)


def _run_forward(q, k, v, beta, g, initial, *, has_gate: bool) -> tuple[Array, Array, Array, Array]:
    (B, T, H, K), V, (_, n_chunks, _, C) = q.shape, v.shape[-1], beta.shape
    launch = partial(_launch, shapes=(q, v, beta), has_gate=has_gate)
    like = partial(jax.ShapeDtypeStruct, dtype=q.dtype)
    (x,) = launch("solve", fwd_kernels.solve_kernel, k, beta, out=[like((B, T, H, C))])
    states, last = segments.pass_states(
        partial(launch, "state", fwd_kernels.state_kernel, k, v, x, beta, g),
        initial,
        [like((B, n_chunks, H, K, V))],
        block=_block("state", q, v, C),
        reverse=False,
    )
    (o,) = launch("out", fwd_kernels.out_kernel, q, k, v, x, beta, g, states, out=[v])
    return o, last, x, states


def _run_backward(q, k, v, beta, g, x, states, do, d_last, *, has_gate: bool) -> tuple[Array, ...]:
    launch = partial(_launch, shapes=(q, v, beta), has_gate=has_gate)
    out_g = g if has_gate else jax.ShapeDtypeStruct((1,), beta.dtype)  # one entry: not written
    d_states, dy, d_initial = segments.pass_states(
        partial(launch, "dstate", bwd_kernels.dstate_kernel, q, k, x, beta, g, do),
        d_last,
        [states, v],
        block=_block("dstate", q, v, beta.shape[-1]),
        reverse=True,
    )
    dq, dk, dv, dbeta, dg, w = launch(
        "rows", bwd_kernels.rows_kernel, q, k, v, x, beta, g, states, do, dy, out=[q, k, v, beta, out_g, v]
    )
    dk, dg = launch(
        "columns", bwd_kernels.columns_kernel, q, k, w, beta, g, states, do, dy, d_states, dk, dg, out=[k, out_g]
    )
    return dq, dk, dv, dbeta, d_initial, *([dg] if has_gate else [])


def _block(kind: str, q: Any, v: Any, chunk: int) -> int:
    """Return the value columns per block, at most the chunk.

    sm80 uses chunks of 32, where blocks of 64 spill.
    """
    return block_of(min(tile(kind, q.dtype).block, chunk), v.shape[-1])


def _launch(
    kind: str,
    kernel: Any,
    *arrays,
    out: list,
    shapes: tuple,
    has_gate: bool,
    segment: int = 1,
    ends: bool = False,
) -> tuple[Array, ...]:
    """Launch `kernel` over all chunks of all heads, or over segments of chunks.

    `segment` counts the chunks per time segment. `shapes` are q, v and beta. Only the passes over time use `segment`
    and `ends` (state_scan/triton/segments.py).
    """
    (B, T, H, K), V, (_, n_chunks, _, C) = shapes[0].shape, shapes[1].shape[-1], shapes[2].shape
    entry = tile(kind, shapes[0].dtype)
    block = _block(kind, shapes[0], shapes[1], C)
    constants: dict[str, Any] = {"V": V, "BLOCK": block, "HAS_GATE": has_gate, "STAGES": entry.stages}
    programs = n_chunks
    if kind in ("state", "dstate"):
        constants |= {"SEGMENT": segment, "ENDS": ends}
        programs = -(-n_chunks // segment) * -(-(V + K if ends else V) // block)
    return runtime.launch(
        kernel,
        *arrays,
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out],
        grid=(B * H * programs,),
        num_warps=entry.warps,
        num_stages=entry.stages,
        name=f"delta_rule_{kind}{'_ends' * ends}",
        T=T,
        H=H,
        K=K,
        KP=padded(K),
        C=C,
        BOUNDED=T % C != 0,
        PRECISION=precision(shapes[0].dtype),
        **({} if kind == "solve" else constants),
    )
