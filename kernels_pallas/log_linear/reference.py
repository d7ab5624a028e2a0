"""Log-linear attention as a sum over all pairs of positions; the tests' oracle."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_pallas.log_linear.levels import level


def log_linear(x_BTHV: Array, log_a_BTH: Array, b_BTN: Array, c_BTN: Array, m_BTHL: Array) -> Array:
    """Compute `kernels_pallas.log_linear` in a form that JAX differentiates."""
    t = np.arange(x_BTHV.shape[1])
    one_hot_TSL = np.asarray(level(t[:, None], t, m_BTHL.shape[-1]))[..., None] == np.arange(m_BTHL.shape[-1])
    factor_BTSH = jnp.einsum("bthl,tsl->btsh", m_BTHL, one_hot_TSL.astype(m_BTHL.dtype))
    g_BTH = jnp.cumsum(log_a_BTH, axis=1)
    is_seen_TS1 = np.tri(len(t), dtype=bool)[..., None]
    decay_BTSH = jnp.exp(jnp.where(is_seen_TS1, g_BTH[:, :, None] - g_BTH[:, None], -jnp.inf))
    scores_BTS = jnp.einsum("btn,bsn->bts", c_BTN, b_BTN)
    return jnp.einsum("btsh,bshv->bthv", scores_BTS[..., None] * decay_BTSH * factor_BTSH, x_BTHV)
