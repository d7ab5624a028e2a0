"""Top-1 Element: attention that outputs the value of the single best key (arXiv 2505.18522, section 4).

o_i = v_m with m = argmax_j q_i . k_j, j <= i. The gradient is straight-through: q and k receive the gradients of
softmax attention. The paper uses it as evidence that full-sequence arbitrary selection is what matters. q and k are
RMS-normalised with a learned gain (the paper says "normalization" without a formula; docs/protocol.md lists such
interpretations).
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

import kernels_pallas
from seqjax.errors import UserError
from seqjax.mixers._attention import AttentionConfig, AttentionMixer
from seqjax.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """The settings; the gradient of v goes to the chosen value (`v_grad` "hard", exact) or as in softmax ("soft")."""

    qk_norm: bool = True
    v_grad: Literal["hard", "soft"] = "hard"
    implementation: str | None = None

    def check(self, *, dim: int, seq_len: int) -> None:
        """Raise `UserError` where these settings do not fit the model."""
        super().check(dim=dim, seq_len=seq_len)
        if self.position == "alibi":
            raise UserError("config.model.mixer.position='alibi' is for softmax attention; choose rope or none.")


class Mixer(AttentionMixer):
    """Attention to a single key per query, chosen from the whole past."""

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array) -> Array:
        """Return `kernels_pallas.top1_element_attention` of the inputs, [B, T, H, K]."""
        return kernels_pallas.top1_element_attention(
            q_BTHK, k_BTGK, v_BTGK, v_grad=self.config.v_grad, implementation=self.config.implementation
        )

    def attend_after(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: Any) -> tuple[Array, Any]:
        """Let T queries attend to the cache and to the keys before them; return [B, T, H, K] and the new cache."""
        lengths_T = cache.length + 1 + jnp.arange(v_BTGK.shape[1])
        cache = self.extend(cache, k_BTGK, v_BTGK)
        # Under vmap, XLA scores all queries in one product; a kernel would get the cache once per query.
        decode = functools.partial(kernels_pallas.top1_element_decode, implementation="xla")
        attend = jax.vmap(decode, in_axes=(1, None, None, 0), out_axes=1)
        return attend(q_BTHK, cache.k_BSGK, cache.v_BSGK, lengths_T), cache

    def attend_step(self, q_BHK: Array, cache) -> Array:
        """Let one query attend to the cache; return [B, H, K]."""
        return kernels_pallas.top1_element_decode(q_BHK, cache.k_BSGK, cache.v_BSGK, cache.length)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of QK^T and, because the backward needs it, PV over the causal half."""
        return 4 * self.config.heads * self.head_dim * (seq_len + 1) / 2
