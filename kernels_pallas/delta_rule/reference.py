"""Token-by-token delta rule, as in the papers; the tests' oracle."""

import jax
import jax.numpy as jnp
from jax import Array


def delta_rule(
    q_BTHK: Array, k_BTHK: Array, v_BTHV: Array, beta_BTH: Array, log_g_BTH: Array | None, initial_BHKV: Array
) -> tuple[Array, Array]:
    """Compute `kernels_pallas.delta_rule` in a form that JAX differentiates."""
    log_g_BTH = jnp.zeros_like(beta_BTH) if log_g_BTH is None else log_g_BTH

    def token(s_BHKV: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        q_BHK, k_BHK, v_BHV, beta_BH, log_g_BH = xs
        s_BHKV = jnp.exp(log_g_BH)[..., None, None] * s_BHKV
        w_BHV = beta_BH[..., None] * (v_BHV - jnp.einsum("bhk,bhkv->bhv", k_BHK, s_BHKV))
        s_BHKV = s_BHKV + k_BHK[..., :, None] * w_BHV[..., None, :]
        return s_BHKV, jnp.einsum("bhk,bhkv->bhv", q_BHK, s_BHKV)

    over_time = tuple(jnp.moveaxis(x, 1, 0) for x in (q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_g_BTH))
    last_BHKV, o = jax.lax.scan(token, initial_BHKV, over_time)
    return jnp.moveaxis(o, 0, 1), last_BHKV
