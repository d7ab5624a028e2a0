"""Transformer: GPT with learned positions, biases, LayerNorm and a GELU MLP.

arXiv 2505.18522, appendix A.

    seqjax train --config=transformer
    seqjax train --config=transformer:110m

Results: lab/results/mixers.md, lab/results/limited_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from Transformer++; GPT's GELU is the tanh form."""
    return {
        "model.norm": "layernorm",
        "model.learned_positions": True,
        "model.mlp.kind": "gelu",
        "model.mlp.dim": 4 * size.dim,
        "model.mlp.bias": True,
        "model.mlp.approximate_gelu": True,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="transformer", mixer={"name": "transformer"}, settings=settings)
