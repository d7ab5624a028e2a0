"""Launch the Triton kernels of PaTH's walk over earlier chunks, with a custom VJP.

Equations and operands: `path_walk/api.py`; kernels: kernels.py. The kernels return the gradients of q, k, v and the
products. This file adds the gradients of `own`, its logsumexp and the gates, which are sums over rows or columns.

A pair p is a query chunk and an earlier chunk. The backward pass saves for each pair the queries as they meet the
earlier chunk, and `behind`, the gradient of the queries after they have passed it. Its memory therefore grows with the
square of the number of chunks.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.path_walk.triton import kernels
from kernels_pallas.triton import runtime
from kernels_pallas.triton.blocks import padded, precision

TILE = 64  # most queries or keys per tile; chunks are powers of two (path_walk/triton/__init__.py)
ROWS = "c b h t"
OPERANDS = "c b h t k, c b h t k, c b h t v, c b h k l, c b h t, c b h t v, c b h t"


def run(
    q_cBHCK: Array,
    k_cBHCK: Array,
    v_cBHCV: Array,
    product_cBHKK: Array,
    forgotten_cBHC: Array | None,
    own_cBHCV: Array,
    lse_cBHC: Array,
) -> Array:
    """Return o_cBHCV; it has first derivatives, in reverse mode."""
    gates = forgotten_cBHC is not None
    # Kernels take no null pointer: without gates, pass an array that they do not read.
    forgotten_cBHC = lse_cBHC if forgotten_cBHC is None else forgotten_cBHC
    return _walk(q_cBHCK, k_cBHCK, v_cBHCV, product_cBHKK, forgotten_cBHC, own_cBHCV, lse_cBHC, gates)


def product_dtype(dtype: Any) -> Any:
    """Return the dtype in which the kernels read P, for keys of `dtype`."""
    return jnp.float32 if dtype == jnp.float32 else jnp.float16


def _fold(f: Any, rule: str) -> Any:
    return fold_vmap(f, rule, split=("b", "h"), axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def _walk(
    q_cBHCK: Array,
    k_cBHCK: Array,
    v_cBHCV: Array,
    product_cBHKK: Array,
    forgotten_cBHC: Array,
    own_cBHCV: Array,
    lse_cBHC: Array,
    gates: bool,
) -> Array:
    operands = q_cBHCK, k_cBHCK, v_cBHCV, product_cBHKK, forgotten_cBHC, own_cBHCV, lse_cBHC
    return _forward(*operands, gates)[0]


def _forward(*operands: Any) -> tuple[Array, tuple[Array, ...]]:
    *arrays, gates = operands
    arrays[3] = arrays[3].astype(product_dtype(arrays[1].dtype))
    launch = _fold(partial(forward, gates=gates), f"{OPERANDS} -> c b h t v, {ROWS}")
    o_cBHCV, total_cBHC = launch(*arrays)
    return o_cBHCV, (*arrays, o_cBHCV, total_cBHC)


def _backward(gates: bool, saved: tuple[Array, ...], do_cBHCV: Array) -> tuple[Array, ...]:
    q_cBHCK, k_cBHCK, v_cBHCV, product_cBHKK, forgotten_cBHC, own_cBHCV, lse_cBHC, o_cBHCV, total_cBHC = saved
    D_cBHC = jnp.einsum("...v,...v->...", do_cBHCV, o_cBHCV)
    share_cBHC = jnp.exp2(lse_cBHC * LOG2_E - total_cBHC)
    dlse_cBHC = share_cBHC * (jnp.einsum("...v,...v->...", do_cBHCV, own_cBHCV) - D_cBHC)
    rule = f"c b h t k, c b h t k, c b h t v, c b h k l, {ROWS}, c b h t v, {ROWS}, {ROWS}"
    rule += f" -> c b h t k, c b h t k, c b h t v, c b h k l, {ROWS}, {ROWS}"
    launch = _fold(partial(backward, gates=gates), rule)
    operands = q_cBHCK, k_cBHCK, v_cBHCV, product_cBHKK, forgotten_cBHC, do_cBHCV.astype(v_cBHCV.dtype)
    *of_operands, of_query_cBHC, of_key_cBHC = launch(*operands, total_cBHC, D_cBHC)
    dgates_cBHC = of_query_cBHC - of_key_cBHC if gates else jnp.zeros_like(forgotten_cBHC)
    return *of_operands, dgates_cBHC, share_cBHC[..., None] * do_cBHCV, dlse_cBHC


_walk.defvjp(_forward, _backward)


def _constants(q_cBHCK: Array, v_cBHCV: Array) -> dict[str, Any]:
    chunks, batch, heads, chunk, width = q_cBHCK.shape
    sizes = {"BH": batch * heads, "CHUNKS": chunks, "C": chunk, "K": width, "KP": padded(width)}
    return sizes | {"M": min(TILE, chunk), "PRECISION": precision(v_cBHCV.dtype)}


def _with_values(v_cBHCV: Array, constants: dict[str, Any], *, gates: bool) -> dict[str, Any]:
    width = v_cBHCV.shape[-1]
    return constants | {"V": width, "VP": padded(width), "N": constants["M"], "GATES": gates}


def _like(x: Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def forward(
    q_cBHCK: Array,
    k_cBHCK: Array,
    v_cBHCV: Array,
    product_cBHKK: Array,
    forgotten_cBHC: Array,
    own_cBHCV: Array,
    lse_cBHC: Array,
    *,
    gates: bool,
) -> tuple[Array, Array]:
    """Return o_cBHCV and the logsumexp of all scores, to base 2."""
    constants = _with_values(v_cBHCV, _constants(q_cBHCK, v_cBHCV), gates=gates)
    o_cBHCV, total_cBHC = runtime.launch(
        kernels.forward_kernel,
        *(q_cBHCK, k_cBHCK, v_cBHCV, product_cBHKK, forgotten_cBHC, own_cBHCV, lse_cBHC),
        out_shape=[_like(own_cBHCV), _like(lse_cBHC)],
        grid=(constants["CHUNKS"] * constants["BH"] * (constants["C"] // constants["M"]),),
        name="path_walk_forward",
        **constants,
    )
    return o_cBHCV, total_cBHC


def backward(
    q_cBHCK: Array,
    k_cBHCK: Array,
    v_cBHCV: Array,
    product_cBHKK: Array,
    forgotten_cBHC: Array,
    do_cBHCV: Array,
    total_cBHC: Array,
    D_cBHC: Array,
    *,
    gates: bool,
) -> tuple[Array, ...]:
    """Return the gradients of q, k, v and P, and the score gradients summed over keys and over queries."""
    of_chunk = _constants(q_cBHCK, v_cBHCV)
    constants = _with_values(v_cBHCV, of_chunk, gates=gates)
    chunks, heads = of_chunk["CHUNKS"], of_chunk["BH"]
    tiles = (chunks * heads * (of_chunk["C"] // of_chunk["M"]),)
    of_pairs = jax.ShapeDtypeStruct((chunks * (chunks - 1) // 2, *k_cBHCK.shape[1:]), k_cBHCK.dtype)
    (queries_pBHCK,) = runtime.launch(
        kernels.queries_kernel,
        *(q_cBHCK, product_cBHKK),
        out_shape=[of_pairs],
        grid=tiles,
        name="path_walk_queries",
        **of_chunk,
    )
    dq_cBHCK, behind_pBHCK, of_query_cBHC = runtime.launch(
        kernels.dq_kernel,
        *(queries_pBHCK, k_cBHCK, v_cBHCV, product_cBHKK, forgotten_cBHC, do_cBHCV, total_cBHC, D_cBHC),
        out_shape=[_like(q_cBHCK), of_pairs, _like(D_cBHC)],
        grid=tiles,
        num_stages=1 if k_cBHCK.dtype == jnp.float32 else 2,  # float32: 2 stages take 144 KiB of shared memory
        name="path_walk_dq",
        **constants,
    )
    products = constants["N"] == constants["C"]
    of_product = _like(product_cBHKK, jnp.float32)
    not_written = jax.ShapeDtypeStruct((1,), jnp.float32)
    dk_cBHCK, dv_cBHCV, of_key_cBHC, dproduct_cBHKK = runtime.launch(
        kernels.dkv_kernel,
        *(queries_pBHCK, behind_pBHCK, k_cBHCK, v_cBHCV, forgotten_cBHC, do_cBHCV, total_cBHC, D_cBHC),
        out_shape=[_like(k_cBHCK), _like(v_cBHCV), _like(D_cBHC), of_product if products else not_written],
        grid=tiles,
        name="path_walk_dkv",
        PRODUCTS=products,
        **constants,
    )
    if not products:
        (dproduct_cBHKK,) = runtime.launch(
            kernels.dproduct_kernel,
            *(queries_pBHCK, behind_pBHCK),
            out_shape=[of_product],
            grid=(chunks * heads,),
            name="path_walk_dproduct",
            **of_chunk,
        )
    return dq_cBHCK, dk_cBHCK, dv_cBHCV, dproduct_cBHKK, of_query_cBHC, of_key_cBHC
