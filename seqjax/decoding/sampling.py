"""Sampling of the next token from logits: temperature, then top k, then top p."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from seqjax.errors import UserError
from seqjax.types import Array, PRNGKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of `sample`."""

    temperature: float = 0.8  # 0 takes the most likely token
    top_k: int = 0  # draw from the k most likely tokens; 0 = all
    top_p: float = 1.0  # draw from the fewest tokens that together have this probability; 1 = all

    def check(self, *, vocab_size: int) -> None:
        """Raise `UserError` for invalid values."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature must be at least 0 and finite, not {self.temperature}; 0 takes the most likely token."
            )
        if not 0 <= self.top_k <= vocab_size:
            raise UserError(f"top_k={self.top_k} must be 0 (all) to {vocab_size}, the vocabulary.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1 (all).")


def sample(logits_BO: Array, key: PRNGKey, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Array:
    """Draw a token per row, int32 [B].

    The temperature is applied first, then `top_k`, then `top_p` (the nucleus of Holtzman et al., arXiv 1904.09751) to
    the remaining tokens. Ties with the last kept token are kept.
    """
    if temperature == 0.0:
        return jnp.argmax(logits_BO, axis=-1).astype(jnp.int32)
    logits_BO = logits_BO / temperature
    if top_k:
        kth_largest_B1 = jax.lax.top_k(logits_BO, top_k)[0][:, -1:]
        logits_BO = jnp.where(logits_BO < kth_largest_B1, -jnp.inf, logits_BO)
    if top_p < 1:
        sorted_BO = jnp.sort(logits_BO, axis=-1, descending=True)
        p_BO = jax.nn.softmax(sorted_BO, axis=-1)
        # A token is kept if the tokens before it do not reach top_p; the first token always is.
        is_kept_BO = jnp.cumsum(p_BO, axis=-1) - p_BO < top_p
        least_B1 = jnp.min(jnp.where(is_kept_BO, sorted_BO, jnp.inf), axis=-1, keepdims=True)
        logits_BO = jnp.where(logits_BO < least_B1, -jnp.inf, logits_BO)
    return jax.random.categorical(key, logits_BO).astype(jnp.int32)
