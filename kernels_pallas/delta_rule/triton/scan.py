"""Launch the Triton kernels of the delta rule; the custom VJP and the tile sizes.

Forward: X * G and M of all chunks [B, T, H, C], then one pass over the chunks that computes the outputs. For a backward
pass it also writes the states at the chunk starts [B, c, H, K, V] and W [B, T, H, V], in the dtype of q. If the pass
has few programs, another launch computes the outputs from the states in parallel (`FUSED`). Few sequences are cut into
time segments, whose states take two launches (state_scan/triton/segments.py). The backward pass keeps the inputs, X *
G, M, the states and W. It computes the state gradients back over the chunks, then the input gradients. Equations:
`delta_rule/api.py`.
"""

from collections.abc import Callable
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


class Passes(NamedTuple):
    """Passes that another backend runs instead of Triton; None keeps Triton's.

    forward replaces the pass over time, reverse the pass back over time (`dstate`), gradients `rows` and `columns`. All
    are hashable: functions of a module, or partials made once.
    """

    forward: Callable[..., tuple[Array, ...]]
    reverse: Callable[..., tuple[Array, ...]] | None = None
    gradients: Callable[..., tuple[Array, ...]] | None = None


# Fewest programs of the pass over time that also computes the outputs. With fewer, every multiprocessor has one program
# or none, so the time of a program counts, and it is shorter without the outputs.
FUSED = 132

# Keyed by kernel and input bits; "fused" is "state" with the outputs. 16-bit entries are the fastest of 12 settings on
# one H200 at Gated DeltaNet's sizes, except `rows` and kernels where more stages gained little (lab/log/kernels.md).
# "fused" and "dstate" are the fastest of four settings there; two programs fit a multiprocessor.
# fp32 spills, most at K = 128: each product is three TF32 products with operands in registers.
TILES = {
    ("solve", 16): Tile(64, 1, 1),
    ("mix", 16): Tile(64, 4, 1),
    ("fused", 16): Tile(64, 4, 2),
    ("state", 16): Tile(64, 4, 3),
    ("out", 16): Tile(64, 4, 1),
    ("dstate", 16): Tile(64, 4, 2),
    ("rows", 16): Tile(64, 8, 1),  # 2 stages give wrong results on Hopper (Triton 3.6): a race
    ("columns", 16): Tile(64, 4, 1),
    ("solve", 32): Tile(16, 1, 1),
    ("mix", 32): Tile(16, 4, 1),
    ("fused", 32): Tile(16, 4, 1),
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
    passes: Passes | None = None,
) -> tuple[Array, Array]:
    """Return (o [B, T, H, V], last state).

    `passes` are the passes of another backend (mosaic_gpu/scan.py).
    """
    chunk = min(longest_chunk(q_BTHK.dtype), padded(min(chunk_size, q_BTHK.shape[1])))
    beta_BcHC = jnp.moveaxis(split_chunks(beta_BTH, chunk), 2, 3)
    g_BcHC = None
    if log_g_BTH is not None:
        g_BcHC = jnp.cumsum(jnp.moveaxis(split_chunks(log_g_BTH, chunk), 2, 3), axis=-1)
    out: Any = _chunked(q_BTHK, k_BTHK, v_BTHV, beta_BcHC, g_BcHC, initial_BHKV, passes)
    return out


# Part of a sharding rule (batching.py): q, k, v, beta, and g (beta again without decay); `g` names the heads.
_OPERANDS = "b t g k, b t g k, b t g v, b c g q, b c g q"


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _chunked(q, k, v, beta_BcHC, g_BcHC, initial, passes) -> tuple[Array, Array]:
    o, last = _call_forward(q, k, v, beta_BcHC, g_BcHC, initial, passes, keep=False)
    return o, last


def _forward(q, k, v, beta, g, initial, passes):
    o, last, *kept = _call_forward(q, k, v, beta, g, initial, passes, keep=True)
    # Same names as in the xla backend: one remat policy keeps these values for both backends.
    names = ("chunk_inverse", "chunk_inverse", "chunk_states", "chunk_states")
    x, m, states, w = (checkpoint_name(value, name) for value, name in zip(kept, names, strict=True))
    return (o, last), (q, k, v, beta, g, x, m, states, w)


def _call_forward(q, k, v, beta, g, initial, passes, *, keep: bool) -> tuple[Array, ...]:
    """Return (o, last state) and, with `keep`, X * G, M, states and W."""
    has_gate = g is not None
    results = "b t g v, b g k v" + ", b t g q, b t g q, b c g k v, b t g v" * keep
    run = partial(_run_forward, has_gate=has_gate, keep=keep, passes=passes)
    run = fold_vmap(run, f"{_OPERANDS}, b g k v -> {results}")
    return run(q, k, v, beta, g if has_gate else beta, initial)


def _backward(passes: Passes | None, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    q, k, v, beta, g, *kept = saved
    has_gate = g is not None
    operands = f"{_OPERANDS}, b t g q, b t g q, b c g k v, b t g v, b t g v, b g k v"
    results = "b t g k, b t g k, b t g v, b c g q, b g k v" + (", b c g q" if has_gate else "")
    run = fold_vmap(partial(_run_backward, has_gate=has_gate, passes=passes), f"{operands} -> {results}")
    dq, dk, dv, dbeta, d_initial, *dg = run(q, k, v, beta, g if has_gate else beta, *kept, *cotangents)
    return dq, dk, dv, dbeta, dg[0] if has_gate else None, d_initial


_chunked.defvjp(_forward, _backward)


def _run_forward(q, k, v, beta, g, initial, *, has_gate: bool, keep: bool, passes: Passes | None) -> tuple[Array, ...]:
    (B, T, H, K), V, (_, n_chunks, _, C) = q.shape, v.shape[-1], beta.shape
    launch = partial(_launch, shapes=(q, v, beta), has_gate=has_gate)
    like = partial(jax.ShapeDtypeStruct, dtype=q.dtype)
    within, like_states = like((B, T, H, C)), like((B, n_chunks, H, K, V))
    (x,) = launch("solve", fwd_kernels.solve_kernel, k, beta, g, out=[within])
    (m,) = launch("mix", fwd_kernels.mix_kernel, q, k, x, g, out=[within])
    if passes is not None:
        o, last, *kept = passes.forward(q, k, v, x, m, beta, g if has_gate else None, initial, keep=keep)
        return (o, last, x, m, *kept) if keep else (o, last)
    is_fused = _is_fused(q, v, beta)
    kind, writes = ("fused", (keep, keep, True)) if is_fused else ("state", (True, keep, False))

    def pass_once(starts: Array, *, out: list, segment: int, ends: bool) -> tuple[Array, ...]:
        *out, last = out
        out = [shape if written else like((1,)) for shape, written in zip(out, writes, strict=True)]
        operands, options = (q, k, v, x, m, beta, g, starts), {"segment": segment, "ends": ends, "writes": writes}
        return launch(kind, fwd_kernels.state_kernel, *operands, out=[*out, last], **options)

    block = _block(kind, q, v, C)
    states, w, o, last = segments.pass_states(pass_once, initial, [like_states, v, v], block=block, reverse=False)
    if not is_fused:
        (o,) = launch("out", fwd_kernels.out_kernel, q, k, v, m, beta, g, states, out=[v])
    return (o, last, x, m, states, w) if keep else (o, last)


def _is_fused(q: Array, v: Array, beta: Array) -> bool:
    """Return whether the pass over time computes the outputs: it then has at least `FUSED` programs."""
    (B, _, H, K), V, (_, n_chunks, _, C) = q.shape, v.shape[-1], beta.shape
    programs = B * H * -(-V // _block("fused", q, v, C))
    return programs * -(-n_chunks // segments.length(programs, n_chunks, work=2 + K / V)) >= FUSED


def _run_backward(
    q, k, v, beta, g, x, m, states, w, do, d_last, *, has_gate: bool, passes: Passes | None
) -> tuple[Array, ...]:
    launch = partial(_launch, shapes=(q, v, beta), has_gate=has_gate)
    out_g = g if has_gate else jax.ShapeDtypeStruct((1,), beta.dtype)  # one entry: not written
    if passes is not None and passes.reverse is not None:
        d_states, dy, d_initial = passes.reverse(q, k, x, m, beta, g if has_gate else None, do, d_last)
    else:
        d_states, dy, d_initial = segments.pass_states(
            partial(launch, "dstate", bwd_kernels.dstate_kernel, q, k, x, m, beta, g, do),
            d_last,
            [states, v],
            block=_block("dstate", q, v, beta.shape[-1]),
            reverse=True,
        )
    if passes is not None and passes.gradients is not None:
        operands = q, k, v, w, beta, g if has_gate else None, states, do, dy, d_states
        dq, dk, dv, dbeta, *dg = passes.gradients(*operands)
        return dq, dk, dv, dbeta, d_initial, *dg
    dq, dk, dv, dbeta, dg = launch(
        "rows", bwd_kernels.rows_kernel, q, k, v, w, beta, g, states, do, dy, out=[q, k, v, beta, out_g]
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
    writes: tuple[bool, ...] = (),
) -> tuple[Array, ...]:
    """Launch `kernel` over all chunks of all heads, or over segments of chunks.

    `segment` counts the chunks per time segment. `shapes` are q, v and beta. Only the passes over time use `segment`
    and `ends` (state_scan/triton/segments.py). `writes`: whether the forward pass writes states, W and o.
    """
    (B, T, H, K), V, (_, n_chunks, _, C) = shapes[0].shape, shapes[1].shape[-1], shapes[2].shape
    entry = tile(kind, shapes[0].dtype)
    block = _block(kind, shapes[0], shapes[1], C)
    constants: dict[str, Any] = {"V": V, "BLOCK": block, "STAGES": entry.stages}
    programs = n_chunks
    if kind in ("state", "fused", "dstate"):
        constants |= {"SEGMENT": segment, "ENDS": ends}
        names = ("STATES", "KEEP", "OUT")[: len(writes)]
        constants |= {name: written and not ends for name, written in zip(names, writes, strict=True)}
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
        HAS_GATE=has_gate,
        BOUNDED=T % C != 0,
        PRECISION=precision(shapes[0].dtype),
        **({} if kind in ("solve", "mix") else constants),
    )
