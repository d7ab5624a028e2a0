"""Launch the Triton kernels of causal attention with forget gates.

The kernels (gated_kernels.py) return the row sums r and column sums c of ds in float32. This module computes the gate
gradient:

    dlog f_l = sum over i >= l > j of ds_ij = sum over i >= l of r_i - c_i

r is zero up to rounding; chunked.py explains why it is kept.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from kernels_pallas.attention.triton import gated_kernels as kernels
from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.top1_element.triton.tile_sizes import tiles
from kernels_pallas.triton import runtime
from kernels_pallas.triton.blocks import padded, precision

OPERANDS = "b t (g r) k, b t g k, b t g v"
PER_HEAD = "b (g r) t"


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
) -> Array:
    """Return o_BTHK. Reverse mode only, once.

    `refusal` excludes windows, slopes, and calls without gates.
    """
    del window, slopes, split
    assert log_f_BTH is not None
    return _attention(q_BTHK, k_BTGK, v_BTGK, log_f_BTH, scale)


def running_sums(log_f_BTH: Array) -> tuple[Array, Array]:
    """Return the running log-gate sums [B, H, T], as whole numbers and a rest.

    The rest is at most 1/2. Differences of both parts are exact to the last bits of float32 at any length. One float32
    sum would lose the digits of near keys: at 100,000 tokens it may be -70,000, where float32 values are 0.008 apart.
    """

    def add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        rest = a[1] + b[1]
        whole = jnp.round(rest)
        return a[0] + b[0] + whole, rest - whole

    log_f_BHT = jnp.moveaxis(log_f_BTH.astype(jnp.float32), 1, 2)
    whole_BHT = jnp.round(log_f_BHT)
    return jax.lax.associative_scan(add, (whole_BHT, log_f_BHT - whole_BHT), axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, log_f_BTH: Array, scale: float) -> Array:
    return _forward(q_BTHK, k_BTGK, v_BTGV, log_f_BTH, scale)[0]


def _forward(
    q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, log_f_BTH: Array, scale: float
) -> tuple[Array, tuple[Array, ...]]:
    rule = f"{OPERANDS}, {PER_HEAD}, {PER_HEAD} -> b t (g r) v, {PER_HEAD}"
    run = fold_vmap(partial(_launch_forward, scale=scale), rule, **heads(q_BTHK, k_BTGK))
    o_BTHV, lse_BHT = run(q_BTHK, k_BTGK, v_BTGV, *running_sums(log_f_BTH))
    o_BTHV, lse_BHT = checkpoint_name(o_BTHV, "attention_out"), checkpoint_name(lse_BHT, "attention_lse")
    return o_BTHV, (q_BTHK, k_BTGK, v_BTGV, log_f_BTH, o_BTHV, lse_BHT)


def _backward(scale: float, saved: tuple[Array, ...], do_BTHV: Array) -> tuple[Array, Array, Array, Array]:
    q_BTHK, k_BTGK, v_BTGV, log_f_BTH, o_BTHV, lse_BHT = saved
    D_BHT = jnp.einsum("bthv,bthv->bht", do_BTHV.astype(jnp.float32), o_BTHV.astype(jnp.float32))
    per_head = ", ".join([PER_HEAD] * 4)
    rule = f"{OPERANDS}, b t (g r) v, {per_head} -> {OPERANDS}, {PER_HEAD}, {PER_HEAD}"
    run = fold_vmap(partial(_launch_backward, scale=scale), rule, **heads(q_BTHK, k_BTGK))
    dq_BTHK, dk_BTGK, dv_BTGV, of_query_BHT, of_key_BHT = run(
        q_BTHK, k_BTGK, v_BTGV, do_BTHV, *running_sums(log_f_BTH), lse_BHT, D_BHT
    )
    dlog_f_BHT = jax.lax.cumsum(of_query_BHT - of_key_BHT, axis=2, reverse=True)
    return dq_BTHK, dk_BTGK, dv_BTGV, jnp.moveaxis(dlog_f_BHT, 1, 2).astype(log_f_BTH.dtype)


_attention.defvjp(_forward, _backward)


def _like(*arrays: Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def _constants(q_BTHK: Array, v_BTGV: Array, scale: float) -> dict[str, Any]:
    sizes = dict(zip("THK", q_BTHK.shape[1:], strict=True)) | dict(zip("GV", v_BTGV.shape[2:], strict=True))
    sizes |= {"KP": padded(sizes["K"]), "VP": padded(sizes["V"])}
    return sizes | {"LOG2_SCALE": scale * LOG2_E, "PRECISION": precision(q_BTHK.dtype)}


def _launch_forward(
    q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, whole_BHT: Array, rest_BHT: Array, *, scale: float
) -> tuple[Array, Array]:
    B, T, H, _ = q_BTHK.shape
    constants = _constants(q_BTHK, v_BTGV, scale)
    tile = tiles("forward", max(constants["KP"], constants["VP"]), q_BTHK.dtype)
    o_BTHV, lse_BHT = runtime.launch(
        kernels.forward_kernel,
        *(q_BTHK, k_BTGK, v_BTGV, whole_BHT, rest_BHT),
        out_shape=[jax.ShapeDtypeStruct((B, T, H, constants["V"]), v_BTGV.dtype), *_like(whole_BHT)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="gated_attention_forward",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        **constants,
    )
    return o_BTHV, lse_BHT


def _launch_backward(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    do_BTHV: Array,
    whole_BHT: Array,
    rest_BHT: Array,
    lse_BHT: Array,
    D_BHT: Array,
    *,
    scale: float,
) -> tuple[Array, Array, Array, Array, Array]:
    B, T, H, _ = q_BTHK.shape
    operands = (q_BTHK, k_BTGK, v_BTGV, do_BTHV, whole_BHT, rest_BHT, lse_BHT, D_BHT)
    constants: dict[str, Any] = _constants(q_BTHK, v_BTGV, scale) | {"SCALE": scale}
    of = partial(tiles, dim=max(constants["KP"], constants["VP"]), dtype=q_BTHK.dtype)
    tile = of("dq")
    dq_BTHK, of_query_BHT = runtime.launch(
        kernels.dq_kernel,
        *operands,
        out_shape=_like(q_BTHK, D_BHT),
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="gated_attention_dq",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        **constants,
    )
    tile = of("dkv")
    dk_BTGK, dv_BTGV, of_key_BHT = runtime.launch(
        kernels.dkv_kernel,
        *operands,
        out_shape=_like(k_BTGK, v_BTGV, D_BHT),
        grid=(-(-T // tile.n) * B * k_BTGK.shape[2],),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="gated_attention_dkv",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        **constants,
    )
    return dq_BTHK, dk_BTGK, dv_BTGV, of_query_BHT, of_key_BHT
