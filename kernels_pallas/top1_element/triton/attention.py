"""Launch the Triton kernels of Top-1 Element attention.

Arrays stay [B, T, H, D], and the kernels read them with strides. For the backward pass, only lse and D = rowsum(do *
soft output) are transposed to [B, H, T]; they have 1 / V of the size. fp32 inputs use three TF32 products (tf32x3),
with an error near fp32's. bf16 and fp16 products are exact, sums are fp32. Two runs give the same bits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.top1_element.triton import attention_bwd_kernels as bwd_kernels
from kernels_pallas.top1_element.triton import attention_kernels as kernels
from kernels_pallas.top1_element.triton.tile_sizes import tiles
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded, precision


def evaluate(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> Array:
    """Return o_BTHV without computing the softmax or its product with v."""
    rule = "b t (g r) k, b t g k, b t g v -> b t (g r) v"
    return fold_vmap(partial(_evaluate, scale=scale), rule, **heads(q_BTHK, k_BTGK))(q_BTHK, k_BTGK, v_BTGV)


def forward(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> tuple[Array, Array, Array]:
    """Return (index_BTH int32, lse_BTH fp32, soft_BTHV).

    The index is the best key. The log-sum-exp and the softmax output are for the backward pass.
    """
    rule = "b t (g r) k, b t g k, b t g v -> b t (g r), b t (g r), b t (g r) v"
    return fold_vmap(partial(_forward, scale=scale), rule, **heads(q_BTHK, k_BTGK))(q_BTHK, k_BTGK, v_BTGV)


def take_values(v_BTGV: Array, index_BTH: Array) -> Array:
    """Return o_BTHV = v[index], exactly."""
    rule = "b t g v, b t (g r) -> b t (g r) v"
    return fold_vmap(_take_values, rule, **heads(index_BTH, v_BTGV))(v_BTGV, index_BTH)


def backward(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    index_BTH: Array,
    lse_BTH: Array,
    soft_BTHV: Array,
    do_BTHV: Array,
    *,
    scale: float,
    v_grad: str,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv), each in the layout and dtype of its primal."""
    rows = "b t (g r) k, b t g k, b t g v, b t (g r), b t (g r), b t (g r) v, b t (g r) v"
    rule = f"{rows} -> b t (g r) k, b t g k, b t g v"
    f = fold_vmap(partial(_backward, scale=scale, v_grad=v_grad), rule, **heads(q_BTHK, k_BTGK))
    return f(q_BTHK, k_BTGK, v_BTGV, index_BTH, lse_BTH, soft_BTHV, do_BTHV)


def _oriented(q_BTHK: Array, scale: float) -> tuple[Array, float, float]:
    """Return (q, scale, sign) with scale > 0.

    The kernels compare unscaled scores, so these must have the same order as scaled scores.
    """
    if scale > 0:
        return q_BTHK, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    return sign * q_BTHK, abs(scale) or 1.0, sign


def _sizes(per_head_BTH: Array, key_BTGK: Array | None = None, value_BTGV: Any = None) -> dict[str, Any]:
    """Return the size constants of a kernel that reads keys, values or both."""
    sizes = dict(zip("TH", per_head_BTH.shape[1:3], strict=True))
    for name, x in (("K", key_BTGK), ("V", value_BTGV)):
        if x is not None:
            sizes |= {"G": x.shape[2], name: x.shape[3], f"{name}P": padded(x.shape[3])}
    return sizes


def _evaluate(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> Array:
    q_BTHK = _oriented(q_BTHK, scale)[0]
    B, T, H, _ = q_BTHK.shape
    sizes = _sizes(q_BTHK, k_BTGK, v_BTGV)
    tile = tiles("forward", max(sizes["KP"], sizes["VP"]), q_BTHK.dtype)
    (tile_BTH,) = runtime.launch(
        kernels.evaluate_kernel,
        q_BTHK,
        k_BTGK,
        out_shape=[jax.ShapeDtypeStruct((B, T, H), jnp.int32)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_element_evaluate",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        PRECISION=precision(q_BTHK.dtype),
        **_sizes(q_BTHK, k_BTGK),
    )
    return _take_values(v_BTGV, _best_key(q_BTHK, k_BTGK, tile_BTH, tile.n))


def _forward(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> tuple[Array, Array, Array]:
    q_BTHK, scale, _ = _oriented(q_BTHK, scale)
    B, T, H, _ = q_BTHK.shape
    sizes = _sizes(q_BTHK, k_BTGK, v_BTGV)
    tile = tiles("forward", max(sizes["KP"], sizes["VP"]), q_BTHK.dtype)
    tile_BTH, lse_BTH, soft_BTHV = runtime.launch(
        kernels.forward_kernel,
        q_BTHK,
        k_BTGK,
        v_BTGV,
        out_shape=[
            jax.ShapeDtypeStruct((B, T, H), jnp.int32),
            jax.ShapeDtypeStruct((B, T, H), jnp.float32),
            jax.ShapeDtypeStruct((B, T, H, sizes["V"]), v_BTGV.dtype),
        ],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_element_forward",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        LOG2_SCALE=scale * LOG2_E,
        PRECISION=precision(q_BTHK.dtype),
        **sizes,
    )
    return _best_key(q_BTHK, k_BTGK, tile_BTH, tile.n), lse_BTH, soft_BTHV


def _best_key(q_BTHK: Array, k_BTGK: Array, tile_BTH: Array, block_n: int) -> Array:
    B, T, H, K = q_BTHK.shape
    # a program holds rows x keys x dim products in registers, 128 per thread
    rows = max(1, 2**14 // (block_n * padded(K)))
    (index_BTH,) = runtime.launch(
        kernels.best_key_kernel,
        q_BTHK,
        k_BTGK,
        tile_BTH,
        out_shape=[jax.ShapeDtypeStruct((B, T, H), jnp.int32)],
        grid=(-(-T // rows) * B * H,),
        name="top1_element_best_key",
        **_sizes(q_BTHK, k_BTGK),
        BLOCK_N=block_n,
        ROWS=rows,
    )
    return index_BTH


def _take_values(v_BTGV: Array, index_BTH: Array) -> Array:
    (B, T, H), V = index_BTH.shape, v_BTGV.shape[3]
    rows = 2**12 // padded(V)
    (o_BTHV,) = runtime.launch(
        kernels.take_values_kernel,
        v_BTGV,
        index_BTH,
        out_shape=[jax.ShapeDtypeStruct((B, T, H, V), v_BTGV.dtype)],
        grid=(-(-T * H // rows) * B,),
        name="top1_element_take_values",
        **_sizes(index_BTH, value_BTGV=v_BTGV),
        ROWS=rows,
    )
    return o_BTHV


def _backward(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    index_BTH: Array,
    lse_BTH: Array,
    soft_BTHV: Array,
    do_BTHV: Array,
    *,
    scale: float,
    v_grad: str,
) -> tuple[Array, Array, Array]:
    q_BTHK, scale, sign = _oriented(q_BTHK, scale)
    B, T, H, _ = q_BTHK.shape
    G = k_BTGK.shape[2]
    sizes = _sizes(q_BTHK, k_BTGK, v_BTGV)
    of = partial(tiles, dim=max(sizes["KP"], sizes["VP"]), dtype=q_BTHK.dtype)
    D_BHT = jnp.einsum("bthv,bthv->bht", do_BTHV.astype(jnp.float32), soft_BTHV.astype(jnp.float32))
    operands = (q_BTHK, k_BTGK, v_BTGV, do_BTHV, LOG2_E * lse_BTH.transpose(0, 2, 1), D_BHT)
    constants: dict[str, Any] = sizes | {
        "SCALE": scale,
        "LOG2_SCALE": scale * LOG2_E,
        "PRECISION": precision(q_BTHK.dtype),
    }
    like_k, like_v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BTGK, v_BTGV))

    tile = of("dq")
    (dq_BTHK,) = runtime.launch(
        bwd_kernels.dq_kernel,
        *operands,
        out_shape=[jax.ShapeDtypeStruct(q_BTHK.shape, q_BTHK.dtype)],
        grid=(-(-T // tile.m) * B * H,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_element_dq",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        **constants,
    )
    tile = of("dkv" if v_grad == "soft" else "dk")
    dk_BTGK, *soft_dv = runtime.launch(
        bwd_kernels.dkv_kernel if v_grad == "soft" else bwd_kernels.dk_kernel,
        *operands,
        out_shape=[like_k, like_v] if v_grad == "soft" else [like_k],
        grid=(-(-T // tile.n) * B * G,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        name="top1_element_dkv",
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        **constants,
    )
    dv_BTGV = soft_dv[0] if soft_dv else _hard_dv(do_BTHV, index_BTH, like_v)
    return (dq_BTHK if sign > 0 else sign * dq_BTHK), dk_BTGK, dv_BTGV


def _hard_dv(do_BTHV: Array, index_BTH: Array, like_v: jax.ShapeDtypeStruct) -> Array:
    B, T, G, _ = like_v.shape
    H = index_BTH.shape[2]
    index_BGM = index_BTH.reshape(B, T, G, H // G).transpose(0, 2, 1, 3).reshape(B, G, -1)
    row_BGM = jax.lax.broadcasted_iota(jnp.int32, index_BGM.shape, 2)
    sorted_BGM, order_BGM = jax.lax.sort((index_BGM, row_BGM), num_keys=1, is_stable=True)
    # keys per program, and rows per step: equal, as for one query per key
    block = 16 if interpreter.is_chosen() else 64 if do_BTHV.dtype.itemsize == 2 else 32
    (dv_BTGV,) = runtime.launch(
        bwd_kernels.hard_dv_kernel,
        do_BTHV,
        sorted_BGM,
        order_BGM,
        out_shape=[like_v],
        grid=(-(-T // block) * B * G,),
        name="top1_element_hard_dv",
        **_sizes(do_BTHV, value_BTGV=like_v),
        BLOCK_N=block,
        BLOCK_R=block,
        STEPS=index_BGM.shape[2].bit_length(),
        PRECISION=precision(do_BTHV.dtype),
    )
    return dv_BTGV
