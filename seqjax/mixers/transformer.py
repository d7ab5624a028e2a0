"""GPT attention: softmax attention with biases and no position signal of its own (arXiv 2505.18522, Appendix A).

The Transformer++ mixer with other defaults. What makes the model GPT is around it: learned positions added to the
embeddings, LayerNorm, GELU MLP of 4 times the width with biases (configs/transformer.py; Radford et al., 2019).
"""

import dataclasses
from typing import Literal

from seqjax.mixers import transformer_pp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(transformer_pp.Config):
    """Biases; positions come from `config.model.learned_positions`."""

    position: Literal["rope", "alibi", "none"] = "none"
    bias: bool = True


class Mixer(transformer_pp.Mixer):
    """Softmax attention."""
