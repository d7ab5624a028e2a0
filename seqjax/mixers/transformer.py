"""GPT attention: softmax attention with biases and without positions.

This is the Transformer++ mixer with other defaults (arXiv 2505.18522, Appendix A). The rest of GPT is around it:
learned positions added to the embeddings, LayerNorm, and a GELU MLP of 4 times the width with biases
(configs/transformer.py; Radford et al., 2019).
"""

from typing import Literal

from flax import nnx

from seqjax.mixers.transformer_pp import TransformerPP
from seqjax.types import Layer


class Transformer(TransformerPP):
    """Causal softmax attention with biases; positions come from the embeddings.

    They are added by `config.model.learned_positions`.
    """

    resets = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = same as heads; fewer = grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        # With "none", only the causal mask and config.model.learned_positions carry position information.
        position: Literal["rope", "alibi", "none"] = "none",
        rope_base: float = 10_000.0,
        rope_share: float = 1.0,  # of each head's channels, the first, are rotated (partial RoPE)
        # Lowers RoPE frequencies for longer sequences (`seqjax.ops.positions.RopeScaling`). The next four settings are
        # its numbers, by default Llama 3.1's; "linear" uses only the factor.
        rope_scaling: Literal["none", "linear", "llama3"] = "none",
        rope_factor: float = 8.0,
        rope_low_freq_factor: float = 1.0,
        rope_high_freq_factor: float = 4.0,
        rope_original_len: int = 8192,
        # RMSNorm with a learned gain over each head's q and k, before RoPE; "full" = over the q and k of all heads
        qk_norm: bool | Literal["full"] = False,
        qk_norm_eps: float = 1e-5,
        bias: bool = True,  # of q, k, v and the output projection
        qkv_bias: bool | None = None,  # of q, k and v only; None = as bias
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before QK norm and RoPE
        gate: bool = False,  # multiplies the heads' output by sigmoid(x W), a gate per channel
        rescale_init: bool = True,  # divides the output matrix's initial values by sqrt(2 n_layers), as in GPT-2
        window: int | None = None,  # includes the query's own position; None = the whole past
        const: Literal["none", "k", "qk"] = "none",  # keys (and queries) from a trained position table
        temperature: float | None = None,  # of unit queries and keys; None = standard scores
        implementation: Literal["cudnn", "splash", "xla", "chunked"] | None = None,  # None = chosen by device
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        super().__init__(
            dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            position=position,
            rope_base=rope_base,
            rope_share=rope_share,
            rope_scaling=rope_scaling,
            rope_factor=rope_factor,
            rope_low_freq_factor=rope_low_freq_factor,
            rope_high_freq_factor=rope_high_freq_factor,
            rope_original_len=rope_original_len,
            qk_norm=qk_norm,
            qk_norm_eps=qk_norm_eps,
            bias=bias,
            qkv_bias=qkv_bias,
            conv=conv,
            gate=gate,
            rescale_init=rescale_init,
            window=window,
            const=const,
            temperature=temperature,
            implementation=implementation,
            layer=layer,
            rngs=rngs,
        )
