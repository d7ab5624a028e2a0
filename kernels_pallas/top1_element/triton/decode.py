"""Launch the Triton kernels of Top-1 Element decoding.

One pass over the keys; one value is read per head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.top1_element.triton import decode_kernels as kernels
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded, precision, splits

BLOCK = 128  # keys per step: 16 KB of bf16 at dim 64
IN_FLIGHT = 48 * 1024  # bytes of keys being copied to shared memory, per program


def decode(q_BHK: Array, k_BSGK: Array, v_BSGV: Array, length: Array) -> Array:
    """Return o_BHV, bit for bit a row of v.

    It needs no scale, because a positive scale does not change the argmax.
    """
    length_B = jnp.broadcast_to(length, q_BHK.shape[:1])
    rule = "b (g r) k, b s g k, b s g v, b -> b (g r) v"
    return fold_vmap(_decode, rule, **heads(q_BHK[:, None], k_BSGK))(q_BHK, k_BSGK, v_BSGV, length_B)


def _decode(q_BHK: Array, k_BSGK: Array, v_BSGV: Array, length_B: Array) -> Array:
    (B, H, K), (S, G) = q_BHK.shape, k_BSGK.shape[1:3]
    V = v_BSGV.shape[-1]
    block = 16 if interpreter.is_chosen() else BLOCK
    n_splits = splits(B * G, -(-S // block), least=4)
    launch = partial(runtime.launch, S=S, H=H, G=G, SPLITS=n_splits)
    score_BHs, index_BHs = launch(
        kernels.best_key_of_split_kernel,
        q_BHK,
        k_BSGK,
        length_B,
        out_shape=[jax.ShapeDtypeStruct((B, H, n_splits), dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(B * G * n_splits,),
        num_stages=max(2, min(4, 1 + IN_FLIGHT // (block * padded(K) * k_BSGK.dtype.itemsize))),
        name="top1_element_decode",
        K=K,
        KP=padded(K),
        RP=padded(H // G),
        BLOCK=block,
        PRECISION=precision(k_BSGK.dtype),
    )
    (o_BHV,) = launch(
        kernels.value_kernel,
        v_BSGV,
        score_BHs,
        index_BHs,
        out_shape=[jax.ShapeDtypeStruct((B, H, V), v_BSGV.dtype)],
        grid=(B * H,),
        num_warps=1,
        name="top1_element_decode_value",
        V=V,
        VP=padded(V),
        SPLITS_P=padded(n_splits),
    )
    return o_BHV
