"""PaTH attention token by token, in the precision of its inputs; the tests' oracle."""

import jax
import jax.numpy as jnp
from jax import Array, lax


def path_attention(
    q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, w_BTGK: Array, beta_BTG: Array, log_f_BTH: Array | None
) -> Array:
    """Compute `kernels_pallas.path_attention`: each token's matrix multiplies all earlier keys."""
    length, width = q_BTHK.shape[1], q_BTHK.shape[-1]
    repeats = q_BTHK.shape[2] // k_BTGK.shape[2]
    k_BTHK, v_BTHV, w_BTHK, beta_BTH = (jnp.repeat(x, repeats, axis=2) for x in (k_BTGK, v_BTGV, w_BTGK, beta_BTG))
    c_BTH = jnp.zeros_like(beta_BTH) if log_f_BTH is None else jnp.cumsum(log_f_BTH, axis=1)

    def body(keys_BTHK: Array, t: Array) -> tuple[Array, Array]:
        q_BHK, k_BHK, w_BHK, beta_BH, c_BH = (x[:, t] for x in (q_BTHK, k_BTHK, w_BTHK, beta_BTH, c_BTH))
        along_BTH = jnp.einsum("bthk,bhk->bth", keys_BTHK, w_BHK)
        keys_BTHK = keys_BTHK - (beta_BH[:, None] * along_BTH)[..., None] * w_BHK[:, None]
        keys_BTHK = keys_BTHK.at[:, t].set(k_BHK)
        s_BTH = jnp.einsum("bhk,bthk->bth", q_BHK, keys_BTHK) * width**-0.5 + c_BH[:, None] - c_BTH
        weights_BTH = jax.nn.softmax(jnp.where(jnp.arange(length)[:, None] <= t, s_BTH, -jnp.inf), axis=1)
        return keys_BTHK, jnp.einsum("bth,bthv->bhv", weights_BTH, v_BTHV)

    _, o_TBHV = lax.scan(body, jnp.zeros_like(k_BTHK), jnp.arange(length))
    return jnp.moveaxis(o_TBHV, 0, 1)
