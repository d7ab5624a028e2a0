"""Launch the Triton kernels of causal attention with forget gates, packed documents, or both.

The kernels (gated_kernels.py) return the row sums r and column sums c of ds in float32. This module computes the gate
gradient, within each document:

    dlog f_l = sum over i >= l > j of ds_ij = sum over i >= l of r_i - c_i

r is zero up to rounding; chunked.py explains why it is kept.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from kernels_pallas.attention import documents
from kernels_pallas.attention.triton import gated_kernels as kernels
from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.segments import first_tokens
from kernels_pallas.top1_element.triton.tile_sizes import tiles
from kernels_pallas.triton import runtime
from kernels_pallas.triton.blocks import padded, precision

OPERANDS = "b t (g r) k, b t g k, b t g v"
PER_HEAD = "b (g r) t"


class Options(NamedTuple):
    """The static arguments of a call."""

    window: int
    scale: float


def attend(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    log_f_BTH: Array | None = None,
    *,
    window: int,
    scale: float,
    slopes: tuple[float, ...],
    split: PartitionSpec | None = None,
    segments_BT: Array | None = None,
) -> Array:
    """Return o_BTHK. Reverse mode only, once.

    `refusal` excludes calls without gates and segments, and windows and slopes without segments. ALiBi's slopes are
    constant log gates.
    """
    del split
    assert log_f_BTH is not None or segments_BT is not None
    if slopes:
        slope_BTH = jnp.broadcast_to(jnp.asarray(slopes, jnp.float32), q_BTHK.shape[:3])
        log_f_BTH = -slope_BTH if log_f_BTH is None else log_f_BTH - slope_BTH
    return _attention(q_BTHK, k_BTGK, v_BTGK, log_f_BTH, segments_BT, Options(window, scale))


def running_sums(log_f_BTH: Array, segments_BT: Array | None = None) -> tuple[Array, Array]:
    """Return the running log-gate sums [B, H, T], as whole numbers and a rest.

    The rest is at most 1/2. Differences of both parts are exact to the last bits of float32 at any length. One float32
    sum would lose the digits of near keys: at 100,000 tokens it may be -70,000, where float32 values are 0.008 apart.

    With segments the rest restarts at each document, and the whole numbers continue from the last token before it. No
    difference within a document, or from it to a later token, then depends on earlier documents: whole numbers have
    exact differences. Sums that restart at zero would be far from the sums of the previous document, and a tile takes
    differences to its last key, possibly in the next document.
    """

    def add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        rest = a[1] + b[1]
        whole = jnp.round(rest)
        return a[0] + b[0] + whole, rest - whole

    log_f_BHT = jnp.moveaxis(log_f_BTH.astype(jnp.float32), 1, 2)
    whole_BHT = jnp.round(log_f_BHT)
    parts = whole_BHT, log_f_BHT - whole_BHT
    if segments_BT is None:
        return jax.lax.associative_scan(add, parts, axis=-1)
    first_B1T = first_tokens(segments_BT)[:, None]
    whole_BHT, rest_BHT = documents.restarting_scan(add, parts, first_B1T, axis=-1)
    before_BHT = jnp.pad(whole_BHT[..., :-1], ((0, 0), (0, 0), (1, 0)))
    return whole_BHT + jnp.cumsum(jnp.where(first_B1T, before_BHT, 0), axis=-1), rest_BHT


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    log_f_BTH: Array | None,
    segments_BT: Array | None,
    options: Options,
) -> Array:
    return _forward(q_BTHK, k_BTGK, v_BTGV, log_f_BTH, segments_BT, options)[0]


def _forward(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    log_f_BTH: Array | None,
    segments_BT: Array | None,
    options: Options,
) -> tuple[Array, tuple[Array | None, ...]]:
    gates = () if log_f_BTH is None else running_sums(log_f_BTH, segments_BT)
    bounds = () if segments_BT is None else (documents.first_keys(segments_BT, options.window),)
    rule = ", ".join([OPERANDS, *[PER_HEAD] * len(gates), *["b t"] * len(bounds)]) + f" -> b t (g r) v, {PER_HEAD}"
    launch = partial(_launch_forward, scale=options.scale, gates=bool(gates), packed=bool(bounds))
    run = fold_vmap(launch, rule, **heads(q_BTHK, k_BTGK))
    o_BTHV, lse_BHT = run(q_BTHK, k_BTGK, v_BTGV, *gates, *bounds)
    o_BTHV, lse_BHT = checkpoint_name(o_BTHV, "attention_out"), checkpoint_name(lse_BHT, "attention_lse")
    return o_BTHV, (q_BTHK, k_BTGK, v_BTGV, log_f_BTH, segments_BT, o_BTHV, lse_BHT)


def _backward(
    options: Options, saved: tuple[Any, ...], do_BTHV: Array
) -> tuple[Array, Array, Array, Array | None, None]:
    q_BTHK, k_BTGK, v_BTGV, log_f_BTH, segments_BT, o_BTHV, lse_BHT = saved
    D_BHT = jnp.einsum("bthv,bthv->bht", do_BTHV.astype(jnp.float32), o_BTHV.astype(jnp.float32))
    gates = () if log_f_BTH is None else running_sums(log_f_BTH, segments_BT)
    bounds = ()
    if segments_BT is not None:
        bounds = tuple(of(segments_BT, options.window) for of in (documents.first_keys, documents.end_of_queries))
    per_row = [*[PER_HEAD] * (len(gates) + 2), *["b t"] * len(bounds)]
    rule = f"{OPERANDS}, b t (g r) v, {', '.join(per_row)} -> {OPERANDS}, {PER_HEAD}, {PER_HEAD}"
    launch = partial(_launch_backward, scale=options.scale, gates=bool(gates), packed=bool(bounds))
    run = fold_vmap(launch, rule, **heads(q_BTHK, k_BTGK))
    dq_BTHK, dk_BTGK, dv_BTGV, of_query_BHT, of_key_BHT = run(
        q_BTHK, k_BTGK, v_BTGV, do_BTHV, *gates, lse_BHT, D_BHT, *bounds
    )
    dlog_f_BTH = None
    if log_f_BTH is not None:
        if segments_BT is None:
            dlog_f_BHT = jax.lax.cumsum(of_query_BHT - of_key_BHT, axis=2, reverse=True)
        else:
            ends_B1T = documents.last_tokens(segments_BT)[:, None]
            dlog_f_BHT = documents.restarting_sum(of_query_BHT - of_key_BHT, ends_B1T, axis=2, reverse=True)
        dlog_f_BTH = jnp.moveaxis(dlog_f_BHT, 1, 2).astype(log_f_BTH.dtype)
    return dq_BTHK, dk_BTGK, dv_BTGV, dlog_f_BTH, None


_attention.defvjp(_forward, _backward)


def _like(*arrays: Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def _constants(q_BTHK: Array, v_BTGV: Array, scale: float) -> dict[str, Any]:
    sizes = dict(zip("THK", q_BTHK.shape[1:], strict=True)) | dict(zip("GV", v_BTGV.shape[2:], strict=True))
    sizes |= {"KP": padded(sizes["K"]), "VP": padded(sizes["V"])}
    return sizes | {"LOG2_SCALE": scale * LOG2_E, "PRECISION": precision(q_BTHK.dtype)}


def _launch_forward(
    q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *rest: Array, scale: float, gates: bool, packed: bool
) -> tuple[Array, Array]:
    """Run the forward kernel; `rest` has the two gate sums with `gates`, then the first keys if `packed`."""
    B, T, H, _ = q_BTHK.shape
    constants = _constants(q_BTHK, v_BTGV, scale)
    tile = tiles("forward", max(constants["KP"], constants["VP"]), q_BTHK.dtype)
    # without gates the first keys are placeholders for the gate sums, which are not read
    sums = rest[:2] if gates else rest * 2
    o_BTHV, lse_BHT = runtime.launch(
        kernels.documents_forward_kernel if packed else kernels.forward_kernel,
        *(q_BTHK, k_BTGK, v_BTGV, *sums, *(rest[-1:] if packed else ())),
        out_shape=[
            jax.ShapeDtypeStruct((B, T, H, constants["V"]), v_BTGV.dtype),
            jax.ShapeDtypeStruct((B, H, T), jnp.float32),
        ],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="packed_attention_forward" if packed else "gated_attention_forward",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        **({"GATES": gates} if packed else {}),
        **constants,
    )
    return o_BTHV, lse_BHT


def _launch_backward(
    q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, do_BTHV: Array, *rest: Array, scale: float, gates: bool, packed: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """Run both backward kernels.

    `rest` has the two gate sums with `gates`, lse and D, then the first keys and the ends of the queries if `packed`.
    """
    B, T, H, _ = q_BTHK.shape
    lse_BHT, D_BHT = rest[2:4] if gates else rest[:2]
    sums = rest[:2] if gates else (lse_BHT, D_BHT)  # placeholders, not read
    first_of, end_of = ((x,) for x in rest[-2:]) if packed else ((), ())
    operands = (q_BTHK, k_BTGK, v_BTGV, do_BTHV, *sums, lse_BHT, D_BHT)
    constants: dict[str, Any] = _constants(q_BTHK, v_BTGV, scale) | {"SCALE": scale}
    constants |= {"GATES": gates} if packed else {}
    of = partial(tiles, dim=max(constants["KP"], constants["VP"]), dtype=q_BTHK.dtype)
    kind = "packed" if packed else "gated"
    tile = of("dq")
    dq_BTHK, of_query_BHT = runtime.launch(
        kernels.documents_dq_kernel if packed else kernels.dq_kernel,
        *(*operands, *first_of),
        out_shape=_like(q_BTHK, D_BHT),
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name=f"{kind}_attention_dq",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        **constants,
    )
    tile = of("dkv")
    dk_BTGK, dv_BTGV, of_key_BHT = runtime.launch(
        kernels.documents_dkv_kernel if packed else kernels.dkv_kernel,
        *(*operands, *end_of),
        out_shape=_like(k_BTGK, v_BTGV, D_BHT),
        grid=(-(-T // tile.n) * B * k_BTGK.shape[2],),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name=f"{kind}_attention_dkv",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        **constants,
    )
    return dq_BTHK, dk_BTGK, dv_BTGV, of_query_BHT, of_key_BHT
