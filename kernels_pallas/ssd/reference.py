"""Token-by-token Mamba-2 recurrence, as in the paper; the tests' oracle."""

import jax
import jax.numpy as jnp
from jax import Array


def ssd(
    x_BTHV: Array, log_a_BTH: Array, b_BTN: Array, c_BTN: Array, initial_BHNV: Array, dt_BTH: Array | None = None
) -> tuple[Array, Array]:
    """Compute `kernels_pallas.ssd` in a form that JAX differentiates."""
    if dt_BTH is not None:
        x_BTHV = x_BTHV * dt_BTH[..., None]

    def token(s_BHNV: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        x_BHV, log_a_BH, b_BHN, c_BHN = xs
        s_BHNV = jnp.exp(log_a_BH)[..., None, None] * s_BHNV + b_BHN[..., None] * x_BHV[:, :, None, :]
        return s_BHNV, jnp.einsum("bhn,bhnv->bhv", c_BHN, s_BHNV)

    shape = (*log_a_BTH.shape, b_BTN.shape[-1])
    b, c = (jnp.broadcast_to(t if t.ndim == 4 else t[:, :, None], shape) for t in (b_BTN, c_BTN))
    over_time = tuple(jnp.moveaxis(x, 1, 0) for x in (x_BTHV, log_a_BTH, b, c))
    last_BHNV, y = jax.lax.scan(token, initial_BHNV, over_time)
    return jnp.moveaxis(y, 0, 1), last_BHNV
