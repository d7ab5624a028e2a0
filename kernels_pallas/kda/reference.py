"""Token-by-token KDA and Gated DeltaNet-2, as in the papers; the tests' oracle."""

import jax
import jax.numpy as jnp
from jax import Array


def kda(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    decay_BTHK: Array,
    beta: Array,
    rate_H: Array,
    bias_HK: Array,
    initial_BHKV: Array,
    *,
    lower_bound: float | None = None,
) -> tuple[Array, Array]:
    """Compute `kernels_pallas.kda` in a form that JAX differentiates."""
    x_BTHK, rate_H1 = decay_BTHK + bias_HK, rate_H[:, None]
    if lower_bound is None:
        log_w_BTHK = -rate_H1 * jax.nn.softplus(x_BTHK)
    else:
        log_w_BTHK = lower_bound * jax.nn.sigmoid(rate_H1 * x_BTHK)
    gate = jax.nn.sigmoid(beta)
    gated_BTHK = (gate if beta.ndim == 4 else gate[..., None]) * k_BTHK
    erased_BTHK, written_BTHK = (gated_BTHK, k_BTHK) if beta.ndim == 4 else (k_BTHK, gated_BTHK)

    def token(s_BHKV: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        q_BHK, v_BHV, log_w_BHK, erased_BHK, written_BHK = xs
        s_BHKV = jnp.exp(log_w_BHK)[..., None] * s_BHKV
        error_BHV = v_BHV - jnp.einsum("bhk,bhkv->bhv", erased_BHK, s_BHKV)
        s_BHKV += written_BHK[..., :, None] * error_BHV[..., None, :]
        return s_BHKV, jnp.einsum("bhk,bhkv->bhv", q_BHK, s_BHKV)

    over_time = tuple(jnp.moveaxis(x, 1, 0) for x in (q_BTHK, v_BTHV, log_w_BTHK, erased_BTHK, written_BTHK))
    last_BHKV, o = jax.lax.scan(token, initial_BHKV, over_time)
    return jnp.moveaxis(o, 0, 1), last_BHKV
