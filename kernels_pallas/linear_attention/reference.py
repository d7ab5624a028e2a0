"""Token-by-token linear attention, as in the papers; the tests' oracle."""

import jax
import jax.numpy as jnp
from jax import Array


def linear_attention(
    r_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    log_w_BTHK: Array,
    u_HK: Array | None,
    a_BTHK: Array | None,
    b_BTHK: Array | None,
    initial_BHKV: Array,
) -> tuple[Array, Array]:
    """Compute `kernels_pallas.linear_attention` in a form that JAX differentiates."""
    low = () if a_BTHK is None else (a_BTHK, k_BTHK if b_BTHK is None else b_BTHK)

    def token(s_BHKV: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        r_BHK, k_BHK, v_BHV, log_w_BHK, *low = xs
        new_BHKV = k_BHK[..., :, None] * v_BHV[..., None, :]
        next_BHKV = jnp.exp(log_w_BHK)[..., None] * s_BHKV + new_BHKV
        if low:
            a_BHK, b_BHK = low
            next_BHKV += b_BHK[..., :, None] * jnp.einsum("bhk,bhkv->bhv", a_BHK, s_BHKV)[..., None, :]
        read_BHKV = next_BHKV if u_HK is None else s_BHKV + u_HK[..., None] * new_BHKV
        return next_BHKV, jnp.einsum("bhk,bhkv->bhv", r_BHK, read_BHKV)

    over_time = tuple(jnp.moveaxis(x, 1, 0) for x in (r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, *low))
    last_BHKV, o = jax.lax.scan(token, initial_BHKV, over_time)
    return jnp.moveaxis(o, 0, 1), last_BHKV
