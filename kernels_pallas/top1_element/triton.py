"""The `triton` backend of Top-1 Element: launches of triton_kernels.py and triton_grad_kernels.py, tile sizes.

Arrays stay [B, T, H, D]; the kernels read them with strides. Only lse and D = rowsum(do * soft output), 1 / V of the
size, are turned to [B, H, T] for the backward pass. fp32 inputs are multiplied as three TF32 products (tf32x3, an error
near fp32's own); bf16 and fp16 products are exact, sums fp32. Two runs give the same bits.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import compat
from kernels_pallas.batching import fold_vmap
from kernels_pallas.top1_element import triton_grad_kernels as grads
from kernels_pallas.top1_element import triton_kernels as kernels
from kernels_pallas.triton_probe import padded, precision

LOG2_E = 1 / math.log(2)


class Tiles(NamedTuple):
    """Queries and keys per step. The outer one (queries, but keys for dk and dkv) is a multiple of the inner one."""

    m: int
    n: int
    warps: int
    stages: int


# By kernel, largest padded dim, 16-bit or not, and whether from Hopper on. Chosen by registers and shared memory as the
# compiler reports them (python -m tests.kernels.compile_triton): no spills, then as many warps on a multiprocessor
# as that leaves, then the largest outer tile, which is how often keys are read again.
#   16-bit, sm80   mma.sync: operands pass through registers, 4 warps of 128 x 32..64 leave room for two programs; at
#                  dim 128 the output tile alone is half of the registers of 4 warps, so 8 warps or smaller tiles
#   16-bit, sm90   wgmma reads the right operand from shared memory: 64 rows per warpgroup, two programs of two each; of
#                  dk, which holds k, v and two score tiles, 32 queries at a time
#   fp32           three TF32 products per tile, each with its operands split in registers: small tiles
# `n` of forward serves evaluate too: it is the unit in which the best key is found first.
_SMALL = Tiles(32, 16, 4, 1)  # the interpreter's: tests see several tiles at T = 50
_TILES = {
    # (kernel, dim, 16-bit, sm90)
    ("forward", 64, True, False): Tiles(128, 64, 4, 3),
    ("forward", 128, True, False): Tiles(128, 64, 8, 3),
    ("forward", 64, True, True): Tiles(128, 64, 8, 3),
    ("forward", 128, True, True): Tiles(128, 64, 8, 3),
    ("forward", 64, False, False): Tiles(64, 16, 4, 2),
    ("forward", 128, False, False): Tiles(32, 32, 8, 2),
    ("dq", 64, True, False): Tiles(128, 32, 4, 3),
    ("dq", 128, True, False): Tiles(64, 64, 4, 2),
    ("dq", 64, True, True): Tiles(128, 64, 8, 3),
    ("dq", 128, True, True): Tiles(128, 32, 8, 2),
    ("dq", 64, False, False): Tiles(32, 32, 4, 2),
    ("dq", 128, False, False): Tiles(32, 16, 8, 2),
    ("dk", 64, True, False): Tiles(32, 128, 4, 3),
    ("dk", 128, True, False): Tiles(32, 64, 4, 2),
    ("dk", 64, True, True): Tiles(32, 128, 8, 3),
    ("dk", 128, True, True): Tiles(64, 64, 4, 2),
    ("dk", 64, False, False): Tiles(32, 32, 4, 2),
    ("dk", 128, False, False): Tiles(16, 16, 4, 2),
    ("dkv", 64, True, False): Tiles(32, 64, 4, 3),
    ("dkv", 128, True, False): Tiles(32, 64, 4, 2),
    ("dkv", 64, True, True): Tiles(32, 128, 8, 3),
    ("dkv", 128, True, True): Tiles(64, 64, 4, 2),
    ("dkv", 64, False, False): Tiles(32, 32, 4, 2),
    ("dkv", 128, False, False): Tiles(16, 16, 4, 2),
}


def tiles(kernel: str, dim: int, dtype: jnp.dtype, capability: int | None) -> Tiles:
    """The table's entry; `capability` None is the interpreter."""
    if capability is None:
        return Tiles(_SMALL.n, _SMALL.m, 4, 1) if kernel in ("dk", "dkv") else _SMALL
    kind = (64 if dim <= 64 else 128, jnp.dtype(dtype).itemsize == 2)
    return _TILES.get((kernel, *kind, capability >= 90)) or _TILES[(kernel, *kind, False)]


def evaluate(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> Array:
    """o_BTHV alone, without the softmax and its product with v."""
    return fold_vmap(partial(_evaluate, scale=scale))(q_BTHK, k_BTGK, v_BTGV)


def forward(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> tuple[Array, Array, Array]:
    """(index_BTH int32, lse_BTH fp32, soft_BTHV): the best key, and the softmax output for the backward pass."""
    return fold_vmap(partial(_forward, scale=scale))(q_BTHK, k_BTGK, v_BTGV)


def take_values(v_BTGV: Array, index_BTH: Array) -> Array:
    """o_BTHV = v[index], exactly."""
    return fold_vmap(_take_values)(v_BTGV, index_BTH)


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
    """(dq, dk, dv), each in the layout and dtype of its primal."""
    f = fold_vmap(partial(_backward, scale=scale, v_grad=v_grad))
    return f(q_BTHK, k_BTGK, v_BTGV, index_BTH, lse_BTH, soft_BTHV, do_BTHV)


def _oriented(q_BTHK: Array, scale: float) -> tuple[Array, float, float]:
    """(q, scale, sign) with a scale above 0: the kernels compare unscaled scores, which must rank like scaled ones."""
    if scale > 0:
        return q_BTHK, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    return sign * q_BTHK, abs(scale) or 1.0, sign


def _sizes(q_BTHK: Array, k_BTGK: Array, dim_v: int) -> dict[str, Any]:
    _, T, H, K = q_BTHK.shape
    return {"T": T, "H": H, "G": k_BTGK.shape[2], "K": K, "V": dim_v, "KP": padded(K), "VP": padded(dim_v)}


def _evaluate(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> Array:
    q_BTHK = _oriented(q_BTHK, scale)[0]
    B, T, H, _ = q_BTHK.shape
    sizes = _sizes(q_BTHK, k_BTGK, v_BTGV.shape[-1])
    tile = tiles("forward", max(sizes["KP"], sizes["VP"]), q_BTHK.dtype, compat.compute_capability())
    (tile_BTH,) = compat.launch(
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
        **{name: sizes[name] for name in ("T", "H", "G", "K", "KP")},
    )
    return _take_values(v_BTGV, _best_key(q_BTHK, k_BTGK, tile_BTH, tile.n))


def _forward(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, *, scale: float) -> tuple[Array, Array, Array]:
    q_BTHK, scale, _ = _oriented(q_BTHK, scale)
    B, T, H, _ = q_BTHK.shape
    sizes = _sizes(q_BTHK, k_BTGK, v_BTGV.shape[-1])
    tile = tiles("forward", max(sizes["KP"], sizes["VP"]), q_BTHK.dtype, compat.compute_capability())
    tile_BTH, lse_BTH, soft_BTHV = compat.launch(
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
    # a program holds rows x keys x dim products in registers: 128 per thread
    rows = max(1, 2**14 // (block_n * padded(K)))
    (index_BTH,) = compat.launch(
        kernels.best_key_kernel,
        q_BTHK,
        k_BTGK,
        tile_BTH,
        out_shape=[jax.ShapeDtypeStruct((B, T, H), jnp.int32)],
        grid=(-(-T // rows) * B * H,),
        name="top1_element_best_key",
        T=T,
        H=H,
        G=k_BTGK.shape[2],
        K=K,
        KP=padded(K),
        BLOCK_N=block_n,
        ROWS=rows,
    )
    return index_BTH


def _take_values(v_BTGV: Array, index_BTH: Array) -> Array:
    (B, T, H), (G, V) = index_BTH.shape, v_BTGV.shape[2:]
    rows = 2**12 // padded(V)
    (o_BTHV,) = compat.launch(
        kernels.take_values_kernel,
        v_BTGV,
        index_BTH,
        out_shape=[jax.ShapeDtypeStruct((B, T, H, V), v_BTGV.dtype)],
        grid=(-(-T * H // rows) * B,),
        name="top1_element_take_values",
        T=T,
        H=H,
        G=G,
        V=V,
        VP=padded(V),
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
    sizes = _sizes(q_BTHK, k_BTGK, v_BTGV.shape[-1])
    of = partial(tiles, dim=max(sizes["KP"], sizes["VP"]), dtype=q_BTHK.dtype, capability=compat.compute_capability())
    D_BHT = jnp.einsum("bthv,bthv->bht", do_BTHV.astype(jnp.float32), soft_BTHV.astype(jnp.float32))
    operands = (q_BTHK, k_BTGK, v_BTGV, do_BTHV, LOG2_E * lse_BTH.transpose(0, 2, 1), D_BHT)
    constants: dict[str, Any] = sizes | {
        "SCALE": scale,
        "LOG2_SCALE": scale * LOG2_E,
        "PRECISION": precision(q_BTHK.dtype),
    }
    like_k, like_v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BTGK, v_BTGV))

    tile = of("dq")
    (dq_BTHK,) = compat.launch(
        grads.dq_kernel,
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
    dk_BTGK, *soft_dv = compat.launch(
        grads.dkv_kernel if v_grad == "soft" else grads.dk_kernel,
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
    B, T, G, V = like_v.shape
    H = index_BTH.shape[2]
    index_BGM = index_BTH.reshape(B, T, G, H // G).transpose(0, 2, 1, 3).reshape(B, G, -1)
    row_BGM = jax.lax.broadcasted_iota(jnp.int32, index_BGM.shape, 2)
    sorted_BGM, order_BGM = jax.lax.sort((index_BGM, row_BGM), num_keys=1, is_stable=True)
    # keys per program, and rows per step: about as many rows as keys when every key has its query
    block = 16 if compat.is_interpreted() else 64 if do_BTHV.dtype.itemsize == 2 else 32
    (dv_BTGV,) = compat.launch(
        grads.hard_dv_kernel,
        do_BTHV,
        sorted_BGM,
        order_BGM,
        out_shape=[like_v],
        grid=(-(-T // block) * B * G,),
        name="top1_element_hard_dv",
        T=T,
        H=H,
        G=G,
        V=V,
        VP=padded(V),
        BLOCK_N=block,
        BLOCK_R=block,
        STEPS=index_BGM.shape[2].bit_length(),
        PRECISION=precision(do_BTHV.dtype),
    )
    return dv_BTGV
