"""Token-by-token selective scan, as in the paper; the tests' oracle."""

import jax
import jax.numpy as jnp
from jax import Array


def selective_scan(
    x_BTE: Array, dt_BTE: Array, A_EN: Array, B_BTN: Array, C_BTN: Array, D_E: Array, initial_BEN: Array
) -> tuple[Array, Array]:
    """Compute `kernels_pallas.selective_scan` in a form that JAX differentiates."""

    def token(h_BEN: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        x_BE, dt_BE, b_BN, c_BN = xs
        h_BEN = jnp.exp(dt_BE[..., None] * A_EN) * h_BEN + (dt_BE * x_BE)[..., None] * b_BN[:, None]
        return h_BEN, jnp.einsum("ben,bn->be", h_BEN, c_BN) + D_E * x_BE

    over_time = tuple(jnp.moveaxis(x, 1, 0) for x in (x_BTE, dt_BTE, B_BTN, C_BTN))
    last_BEN, y = jax.lax.scan(token, initial_BEN, over_time)
    return jnp.moveaxis(y, 0, 1), last_BEN
