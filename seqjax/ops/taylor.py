"""Linear attention with the exponential's second-order Taylor kernel, in chunks.

    y_i = sum_{j<=i} f(s_ij) v_j / (sum_{j<=i} f(s_ij) + eps),   f(s) = 1 + s + s^2 / 2,   s_ij = q_i . k_j / sqrt(K)

This is Based's attention: Arora et al., arXiv 2402.18668. f(s) = phi(q) . phi(k) with phi(x) = [1, x / K^1/4, products
x_m x_n / sqrt(2 K)]. f is at least 1/2, so the sums cannot vanish. Within a chunk f is computed from the scores. Across
chunks the state is S = sum_j phi(k_j) [v_j, 1]^T; its last column is the denominator. The state is float32, because in
bfloat16 it would stop growing after some 256 tokens.

The products x_m x_n and x_n x_m are stored as one feature, computed as x times x rolled by 0 ... K / 2. This needs 1 +
K + K (K/2 + 1) features instead of 1 + K + K^2 (161 instead of 273 at K = 16), without a gather.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from kernels_pallas import accumulation_dtype, join_chunks, split_chunks, state_passing
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 128
EPS = 1e-12


def taylor_features(n_key: int) -> int:
    """Return the length of phi for keys of length `n_key`."""
    return 1 + n_key + n_key * (n_key // 2 + 1)


def taylor_linear_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    *,
    initial_state: Float[Array, "B H F V+1"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H F V+1"]]:
    """Return the outputs and, with `return_state`, the float32 state.

    The outputs have the dtype of `v_BTHV`; the state is [B, H, taylor_features(K), V + 1]. The result does not depend
    on `chunk_size` (default 128, at most T).
    """
    n_batch, seq_len, n_heads, n_value = v_BTHV.shape
    acc = accumulation_dtype(v_BTHV)
    if initial_state is None:
        initial_state = jnp.zeros((n_batch, n_heads, taylor_features(q_BTHK.shape[-1]), n_value + 1), acc)
    chunk = min(chunk_size or CHUNK, seq_len)
    q_BTHK, k_BTHK, v_BTHV = (time_to_heads(x) for x in (q_BTHK, k_BTHK, v_BTHV))
    out: Any = _chunked(q_BTHK, k_BTHK, v_BTHV, initial_state.astype(acc), chunk)
    y_BTHV, state_BHFV = heads_to_time(out[0]), out[1]
    return (y_BTHV, state_BHFV) if return_state else y_BTHV


def _features(x: Array) -> Array:
    """Return phi(x), [..., F], of x [..., K]."""
    n_key = x.shape[-1]
    x = x * n_key**-0.25
    pairs = []
    for shift in range(n_key // 2 + 1):
        # Shift 0 contains each square once, and shift K / 2 each pair twice; at other shifts one product counts for
        # two.
        complete = shift == 0 or 2 * shift == n_key
        pairs.append(x * jnp.roll(x, shift, axis=-1) * (0.5**0.5 if complete else 1.0))
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x, *pairs], axis=-1)


@functools.partial(jax.checkpoint, static_argnums=(4,), prevent_cse=False)
def _chunked(q_BTHK: Array, k_BTHK: Array, v_BTHV: Array, initial_BHFV: Array, chunk: int) -> tuple[Array, Array]:
    acc, dtype, seq_len = initial_BHFV.dtype, v_BTHV.dtype, v_BTHV.shape[1]
    # Until `y_BcHCV`, V includes a last column: ones in the values (zeros in the padding), the denominator in the sums.
    v_BTHV = jnp.concatenate([v_BTHV, jnp.ones_like(v_BTHV[..., :1])], axis=-1)
    q_BcHCK, k_BcHCK, v_BcHCV = (jnp.moveaxis(split_chunks(t, chunk), 3, 2) for t in (q_BTHK, k_BTHK, v_BTHV))
    s_BcHCC = jnp.einsum("bchik,bchjk->bchij", q_BcHCK, k_BcHCK, preferred_element_type=acc) * q_BcHCK.shape[-1] ** -0.5
    weights_BcHCC = jnp.tril(1 + s_BcHCC + s_BcHCC * s_BcHCC / 2).astype(dtype)
    inside_BcHCV = jnp.einsum("bchij,bchjv->bchiv", weights_BcHCC, v_BcHCV, preferred_element_type=acc)
    update_BcHFV = jnp.einsum("bchjf,bchjv->bchfv", _features(k_BcHCK.astype(acc)), v_BcHCV.astype(acc))
    decay_1c111 = jnp.ones((1, update_BcHFV.shape[1], 1, 1, 1), acc)
    states_BcHFV, last_BHFV = state_passing(decay_1c111, update_BcHFV, initial_BHFV)
    both_BcHCV = inside_BcHCV + jnp.einsum("bchif,bchfv->bchiv", _features(q_BcHCK.astype(acc)), states_BcHFV)
    y_BcHCV = both_BcHCV[..., :-1] / (both_BcHCV[..., -1:] + EPS)
    return join_chunks(jnp.moveaxis(y_BcHCV, 2, 3), seq_len).astype(dtype), last_BHFV
