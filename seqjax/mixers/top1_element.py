"""Top-1 Element: attention that outputs the value of the single best key.

    o_i = v_m with m = argmax_j q_i . k_j, j <= i

arXiv 2505.18522, section 4. The gradient is straight-through: q and k receive the gradients of softmax attention. The
paper uses it as evidence that full-sequence arbitrary selection is what matters. q and k are RMS-normalised with a
learned gain (the paper says "normalization" without a formula; docs/protocol.md lists such interpretations).
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import kernels_pallas
from seqjax.mixers._attention import AttentionMixer
from seqjax.ops.attention import in_groups
from seqjax.types import Array, Layer


class Top1Element(AttentionMixer):
    """Attention to a single key per query, chosen from the whole past."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        # With "none", only the causal mask and config.model.learned_positions carry position information.
        position: Literal["rope", "none"] = "rope",
        rope_base: float = 10_000.0,
        rope_share: float = 1.0,  # of each head's channels, the first, are rotated (partial RoPE)
        # RMSNorm with a learned gain over each head's q and k, before RoPE; "full" = over the q and k of all heads
        qk_norm: bool | Literal["full"] = True,
        bias: bool = False,
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before QK norm and RoPE
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        v_grad: Literal["hard", "soft"] = "hard",  # gradient of v: only to the chosen value, or as in softmax
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        self.v_grad: Literal["hard", "soft"] = v_grad
        self.implementation = implementation
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position=position,
            rope_base=rope_base,
            rope_share=rope_share,
            qk_norm=qk_norm,
            bias=bias,
            conv=conv,
            gate=gate,
            layer=layer,
            rngs=rngs,
        )

    def attend(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array) -> Array:
        """Return `kernels_pallas.top1_element_attention` of the inputs, [B, T, H, K]."""
        return kernels_pallas.top1_element_attention(
            q_BTHK, k_BTGK, v_BTGK, v_grad=self.v_grad, implementation=self.implementation
        )

    def attend_after(self, q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, cache: Any) -> tuple[Array, Any]:
        """Attend from T new tokens to the cache and to each other, causally.

        Returns [B, T, H, K] and the extended cache.
        """
        lengths_T = cache.length + 1 + jnp.arange(v_BTGK.shape[1])
        cache = self.extend(cache, k_BTGK, v_BTGK)
        # Under vmap, XLA scores a group of queries in one product; a kernel would read the cache once per query.
        decode = functools.partial(kernels_pallas.top1_element_decode, implementation="xla")
        attend = jax.vmap(decode, in_axes=(1, None, None, 0), out_axes=1)
        return in_groups(lambda q, lengths: attend(q, cache.k_BSGK, cache.v_BSGK, lengths), q_BTHK, lengths_T), cache

    def attend_step(self, q_BHK: Array, cache) -> Array:
        """Attend from one query to the cache; return [B, H, K]."""
        return kernels_pallas.top1_element_decode(q_BHK, cache.k_BSGK, cache.v_BSGK, cache.length)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of QK^T and PV over the causal half, per token.

        The backward needs PV.
        """
        return 4 * self.heads * self.head_dim * (seq_len + 1) / 2
