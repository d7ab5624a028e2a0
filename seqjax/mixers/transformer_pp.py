"""Transformer++ attention: RoPE on q and k, no biases, causal softmax over everything or over a window.

o_i = sum_j softmax_j(q_i . k_j / sqrt(K)) v_j for 0 <= i - j < W (arXiv 2505.18522, section 2 and Appendix A). With
RMSNorm and GeGLU around it this is the paper's Transformer++ (109.5M parameters at 768 x 12, tied); `window=256` is
its sliding-window model.
"""

import dataclasses
from typing import Any

from seqjax.errors import UserError
from seqjax.mixers._attention import AttentionConfig, AttentionMixer
from seqjax.ops.attention import attention_step, causal_attention
from seqjax.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """`window` counts the query's own position; 0 sees the whole past."""

    window: int = 0
    implementation: str | None = None  # None (choose) | cudnn | xla

    def check(self, *, dim: int, seq_len: int) -> None:
        """Raise `UserError` where these settings do not fit the model."""
        super().check(dim=dim, seq_len=seq_len)
        if self.window < 0:
            raise UserError(f"config.model.mixer.window={self.window}: give the keys a query sees, or 0 for all.")


class Mixer(AttentionMixer):
    """Softmax attention."""

    @property
    def window(self) -> int:
        """Keys a query sees; 0 = all."""
        return self.config.window

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array) -> Array:
        """See `ops.attention.causal_attention`."""
        options: Any = {"window": self.window, "implementation": self.config.implementation}
        return causal_attention(q_BTHK, k_BTGK, v_BTGK, slopes=self.slopes, **options)

    def attend_step(self, q_BHK: Array, cache) -> Array:
        """One query over the cache."""
        return attention_step(q_BHK, cache.k_BSGK, cache.v_BSGK, cache.length, slopes=self.slopes)

    def flops_per_token(self, seq_len: int) -> float:
        """QK^T and PV over the keys that the mask leaves, averaged over positions."""
        width = min(self.window or seq_len, seq_len)
        keys = width - width * (width - 1) / (2 * seq_len)
        return 4 * self.config.heads * self.head_dim * keys
