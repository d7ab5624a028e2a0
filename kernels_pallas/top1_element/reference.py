"""Top-1 Element computed from its definition; the oracle of the tests.

Dense, O(T^2), differentiated by JAX.

    s_ij = scale q_i . k_j  (j <= i),  p_i = softmax(s_i),  m_i = argmax_j s_ij (ties: smallest j)
    A = stop_gradient(onehot(m) - p) + p                       the straight-through matrix
    v_grad="hard":  o = A v                                    dv_j = sum of do_i over {i: m_i = j}
    v_grad="soft":  o = p v + stop_gradient(v[m] - p v)        dv_j = sum_i p_ij do_i
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def top1_element_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    scale: float | None = None,
    v_grad: str = "hard",
) -> Float[Array, "B T H V"]:
    """Return the result of `kernels_pallas.top1_element_attention`.

    It is equal up to the rounding of 1 - p + p.
    """
    scale = float(q_BTHK.shape[-1] ** -0.5) if scale is None else scale
    dtype = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    T, H = q_BTHK.shape[1:3]
    q_BTHK = q_BTHK.astype(dtype)
    k_BTHK, v_BTHV = (jnp.repeat(x.astype(dtype), H // x.shape[2], axis=2) for x in (k_BTGK, v_BTGV))
    s_BTHS = scale * jnp.einsum("bthk,bshk->bths", q_BTHK, k_BTHK, precision="highest")
    is_past_TS = jnp.arange(T)[:, None] >= jnp.arange(T)[None, :]
    s_BTHS = jnp.where(is_past_TS[None, :, None, :], s_BTHS, -jnp.inf)
    p_BTHS = jax.nn.softmax(s_BTHS, axis=-1)
    hot_BTHS = jax.nn.one_hot(jnp.argmax(s_BTHS, axis=-1), T, dtype=dtype)

    def weigh(a_BTHS):
        return jnp.einsum("bths,bshv->bthv", a_BTHS, v_BTHV, precision="highest")

    if v_grad == "hard":
        o_BTHV = weigh(jax.lax.stop_gradient(hot_BTHS - p_BTHS) + p_BTHS)
    else:
        soft_BTHV = weigh(p_BTHS)
        o_BTHV = soft_BTHV + jax.lax.stop_gradient(weigh(hot_BTHS) - soft_BTHV)
    return o_BTHV.astype(v_BTGV.dtype)
