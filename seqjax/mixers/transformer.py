"""GPT attention: softmax attention with biases and no position signal of its own (arXiv 2505.18522, Appendix A).

This is the Transformer++ mixer with other defaults. The rest of GPT is around it: learned positions added to the
embeddings, LayerNorm, and a GELU MLP of 4 times the width with biases (configs/transformer.py; Radford et al., 2019).
"""

from typing import Literal

from flax import nnx

from seqjax.mixers.transformer_pp import TransformerPP
from seqjax.types import Layer


class Transformer(TransformerPP):
    """Causal softmax attention with biases; `config.model.learned_positions` adds the positions."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,  # None = as many as heads; fewer is grouped-query attention
        head_dim: int | None = None,  # None = model width / heads
        # With "none", only the causal mask and config.model.learned_positions carry position information.
        position: Literal["rope", "alibi", "none"] = "none",
        rope_base: float = 10_000.0,
        qk_norm: bool = False,  # RMSNorm with a learned gain over each head's q and k, before RoPE
        bias: bool = True,
        conv: bool = False,  # adds a convolution over 4 tokens to each of q, k and v, before QK norm and RoPE
        window: int | None = None,  # includes the query's own position; None = the whole past
        const: Literal["none", "k", "qk"] = "none",  # keys (and queries) that are a trained position table
        temperature: float | None = None,  # of unit queries and keys; None = scores as usual
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
            qk_norm=qk_norm,
            bias=bias,
            conv=conv,
            window=window,
            const=const,
            temperature=temperature,
            implementation=implementation,
            layer=layer,
            rngs=rngs,
        )
