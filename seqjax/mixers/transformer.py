"""GPT attention: softmax attention with biases and no position signal of its own (arXiv 2505.18522, Appendix A).

This is the Transformer++ mixer with other defaults. The rest of GPT is around it: learned positions added to the
embeddings, LayerNorm, and a GELU MLP of 4 times the width with biases (configs/transformer.py; Radford et al., 2019).
"""

import dataclasses
from typing import Literal

from seqjax.mixers import transformer_pp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(transformer_pp.Config):
    """The settings of GPT: biases, and no positions of its own (`config.model.learned_positions` adds them)."""

    position: Literal["rope", "alibi", "none"] = "none"
    bias: bool = True


class Mixer(transformer_pp.Mixer):
    """Causal softmax attention."""
