"""Linear attention with a decay per channel and a bonus for the token itself: RWKV-5 and RWKV-6, in chunks.

    y_t = r_t (S_{t-1} + diag(u) k_t^T v_t),   S_t = diag(w_t) S_{t-1} + k_t^T v_t        S [K, V] per head

Peng et al., arXiv 2404.05892; RWKV-5's decay is constant in time. With g the running sum of log w inside a chunk and
g' = g - log w (the sum before the token):

    A_ij = sum_n r_in k_jn e^{g'_in - g_jn} for j < i,   A_ii = sum_n r_in u_n k_in
    Y = A V + (r * e^{g'}) S,   S <- diag(e^{g_end}) S + (k * e^{g_end - g})^T V

log w has no lower bound, so k e^{-g} may overflow. A is therefore made by halving: the lower left quarter is a product
of r e^{g' - g*} and k e^{g* - g} with g* the sum up to the middle, both exponents at most 0; the two diagonal quarters
are halved again until a block of 16 is left, where the difference itself goes into the exponential. Decays, states and
sums are float32; the backward pass keeps the inputs alone.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from seqjax.ops._chunks import accumulator, carry_states, cut, join
from seqjax.types import Array

CHUNK = 64
# A decay of e^-60 leaves nothing in float32; below it, sums of log w would lose the digits of their differences.
FLOOR = -60.0
BLOCK = 16  # side of the diagonal blocks that are not halved


def wkv6(
    r_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_w_BTHK: Float[Array, "#B #T H K"],
    u_HK: Float[Array, "H K"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Outputs, in the dtype of `v_BTHV`, and with `return_state` the float32 state after the last token.

    `log_w_BTHK` is at most 0, as negative as it likes; float32 is advised. Its B and T may be 1 (a constant decay). The
    result does not depend on `chunk_size` (default 64, at most T).
    """
    n_batch, seq_len, n_heads, n_key = r_BTHK.shape
    acc = accumulator(v_BTHV, log_w_BTHK)
    if initial_state is None:
        initial_state = jnp.zeros((n_batch, n_heads, n_key, v_BTHV.shape[-1]), acc)
    log_w_BTHK = jnp.broadcast_to(jnp.maximum(log_w_BTHK.astype(acc), FLOOR), r_BTHK.shape)
    chunk = min(chunk_size or CHUNK, seq_len)
    y_BTHV, state = _chunked(r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, u_HK, initial_state.astype(acc), chunk)
    return (y_BTHV, state) if return_state else y_BTHV


@functools.partial(jax.checkpoint, static_argnums=(6,), prevent_cse=False)
def _chunked(
    r: Array, k: Array, v: Array, log_w: Array, u_HK: Array, initial: Array, chunk: int
) -> tuple[Array, Array]:
    acc, dtype, seq_len = log_w.dtype, v.dtype, v.shape[1]
    # [B, c, H, C, K]; what is padded after the end decays nothing and adds nothing
    r, k, v, log_w = (jnp.moveaxis(cut(t, chunk), 3, 2) for t in (r, k, v, log_w))
    g = jnp.cumsum(log_w, axis=-2)
    before = g - log_w
    r32, k32 = r.astype(acc), k.astype(acc)
    bonus = jnp.sum(r32 * u_HK.astype(acc)[:, None] * k32, axis=-1)
    scores = decayed_scores(r32, k32, before, g, dtype=dtype)
    inside = jnp.einsum("bchij,bchjv->bchiv", scores.astype(dtype), v, preferred_element_type=acc)
    inside += bonus[..., None] * v.astype(acc)
    rest = (k32 * jnp.exp(g[..., -1:, :] - g)).astype(dtype)
    update = jnp.einsum("bchjk,bchjv->bchkv", rest, v, preferred_element_type=acc)
    states, last = carry_states(jnp.exp(g[..., -1, :])[..., None], update, initial)
    seen = (r32 * jnp.exp(before)).astype(dtype)
    y = inside + jnp.einsum("bchik,bchkv->bchiv", seen, states.astype(dtype), preferred_element_type=acc)
    return join(jnp.moveaxis(y, 2, 3), seq_len).astype(dtype), last


def decayed_scores(r: Array, k: Array, before: Array, g: Array, *, dtype) -> Array:
    """sum_n r_in k_jn e^{before_in - g_jn} for j < i, else 0: [..., C, K] -> [..., C, C]."""
    size = r.shape[-2]
    if size <= BLOCK or size % 2:
        i, j = jnp.arange(size)[:, None], jnp.arange(size)[None]
        exponent = before[..., :, None, :] - g[..., None, :, :]
        decay = jnp.exp(jnp.where((j < i)[..., None], exponent, -jnp.inf))
        return jnp.sum(r[..., :, None, :] * k[..., None, :, :] * decay, axis=-1)
    half = size // 2
    # the two diagonal quarters as one batch
    halves = (x.reshape(*x.shape[:-2], 2, half, x.shape[-1]) for x in (r, k, before, g))
    diagonal = decayed_scores(*halves, dtype=dtype)
    middle = g[..., half - 1 : half, :]
    left = (r[..., half:, :] * jnp.exp(before[..., half:, :] - middle)).astype(dtype)
    right = (k[..., :half, :] * jnp.exp(middle - g[..., :half, :])).astype(dtype)
    corner = jnp.einsum("...ik,...jk->...ij", left, right, preferred_element_type=r.dtype)
    top = jnp.concatenate([diagonal[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, diagonal[..., 1, :, :]], axis=-1)], axis=-2)
