"""The (gated) delta rule: a linear-attention state that is corrected towards each value.

    S_t = e^{g_t} S_{t-1} + k_t (x) beta_t (v_t - k_t^T e^{g_t} S_{t-1}),   y_t = q_t^T S_t,   S [K, V], float32

See DeltaNet (arXiv 2406.06484, g = 0) and Gated DeltaNet (arXiv 2412.06464); public code: flash-linear-attention,
`fla/ops/{delta_rule,gated_delta_rule}/naive.py`. In a chunk, with g summed from its start and G_ij = e^{g_i - g_j},

    X = (I + stril(beta_i k_i.k_j G_ij))^{-1},   W = X beta (V - e^g K S),
    Y = e^g Q S + tril(Q K^T G) W,               S <- e^{g_C} S + (e^{g_C - g} K)^T W.

W is affine in S, so all products but one per chunk run over all chunks at once (`state_scan`). Exponents are never
positive where they are used. The inverse, decays, beta and states are float32, products take the dtype of the inputs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from kernels_pallas import accumulation_dtype, state_scan
from seqjax.ops.chunked import carry_precision, from_chunks, product, rematerialized, to_chunks
from seqjax.ops.triangular import unit_lower_inverse
from seqjax.types import Array

CHUNK = 64


def gated_delta_rule(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    beta_BTH: Float[Array, "B T H"],
    log_g_BTH: Float[Array, "B T H"] | None = None,
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs in the dtype of `q_BTHK`, and with `return_state` the final state in at least float32.

    `q_BTHK` must be scaled and `k_BTHK` of unit norm; `beta_BTH` is in [0, 2] and `log_g_BTH` <= 0. The result does not
    depend on `chunk_size` (default 64, at most T), but time and memory do. The inputs and one state and one inverse per
    chunk are saved for the backward pass.
    """
    n_batch, seq_len, n_heads, key_dim = q_BTHK.shape
    acc = accumulation_dtype(q_BTHK)
    shape = (n_batch, n_heads, key_dim, v_BTHV.shape[-1])
    s_BHKV = jnp.zeros(shape, acc) if initial_state is None else initial_state.astype(acc)
    chunk = min(chunk_size or CHUNK, seq_len)
    o_BTHV, s_BHKV = _chunked(chunk, q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_g_BTH, s_BHKV)
    return (o_BTHV, s_BHKV) if return_state else o_BTHV


@rematerialized
def _chunked(chunk: int, q, k, v, beta, log_g, s_BHKV) -> tuple[Array, Array]:
    # In chunks, arrays are [c, B, H, C, ...]; i and j index positions within a chunk.
    seq_len, dtype, acc = q.shape[1], q.dtype, s_BHKV.dtype
    q, k, v = (to_chunks(x, chunk) for x in (q, k.astype(dtype), v.astype(dtype)))
    beta = to_chunks(beta.astype(acc), chunk)
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    if log_g is None:
        ratio, grow, decay_to_end = 1.0, None, None
        decay = jnp.ones((*beta.shape[:3], 1), acc)
    else:
        g = jnp.cumsum(to_chunks(log_g.astype(acc), chunk), -1)
        # Masked before the exponential, because above the diagonal it and its gradient could overflow.
        ratio = jnp.exp(jnp.where(lower, g[..., :, None] - g[..., None, :], -jnp.inf))
        grow, decay_to_end = jnp.exp(g), jnp.exp(g[..., -1:] - g)
        decay = grow[..., -1:]

    keys = product("...ik,...jk->...ij", k, k) * ratio * beta[..., :, None]
    x = unit_lower_inverse(jnp.where(jnp.tril(lower, -1), keys, 0)) * beta[..., None, :]
    u = product("...ij,...jv->...iv", x.astype(dtype), v)
    # W = U - E S
    e = product("...ij,...jk->...ik", _scaled_columns(x, grow).astype(dtype), k).astype(dtype)
    k_out = _scaled_rows(k, decay_to_end)
    p = -product("...ik,...ij->...kj", k_out, e)
    r = product("...ik,...iv->...kv", k_out, u.astype(dtype))
    starts, final = state_scan(decay, p, r, s_BHKV, precision=carry_precision(dtype))

    starts = starts.astype(dtype)
    w = (u - product("...ik,...kv->...iv", e, starts)).astype(dtype)
    scores = jnp.where(lower, product("...ik,...jk->...ij", q, k) * ratio, 0).astype(dtype)
    o = product("...ik,...kv->...iv", _scaled_rows(q, grow), starts) + product("...ij,...jv->...iv", scores, w)
    return from_chunks(o.astype(dtype), seq_len), final


def _scaled_columns(x: Array, by: Array | None) -> Array:
    return x if by is None else x * by[..., None, :]


def _scaled_rows(x: Array, by: Array | None) -> Array:
    return x if by is None else (x * by[..., :, None]).astype(x.dtype)


def gated_delta_rule_step(
    q_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    beta_BH: Float[Array, "B H"],
    log_g_BH: Float[Array, "B H"] | None,
    s_BHKV: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Return the output, in the dtype of `q_BHK`, and the state after one step, computed in the dtype of the state."""
    exact, acc = jax.lax.Precision.HIGHEST, s_BHKV.dtype
    q, k, v, beta = (x.astype(acc) for x in (q_BHK, k_BHK, v_BHV, beta_BH))
    if log_g_BH is not None:
        s_BHKV = s_BHKV * jnp.exp(log_g_BH.astype(acc))[..., None, None]
    w = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, s_BHKV, precision=exact))
    s_BHKV = s_BHKV + k[..., :, None] * w[..., None, :]
    return jnp.einsum("bhk,bhkv->bhv", q, s_BHKV, precision=exact).astype(q_BHK.dtype), s_BHKV
