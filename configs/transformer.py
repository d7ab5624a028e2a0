"""Transformer: GPT with learned positions, biases, LayerNorm and a GELU MLP (the paper's first baseline).

python -m seqjax.main --config=configs/transformer.py:110m

One H200, 489k tokens/s; 200 steps end at 5.83 / 5.90 nats in domain (docs/mixers.md, with the settings). The paper's
length and the other sizes: not run.
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return what differs from Transformer++; GPT's GELU is the tanh form."""
    return {
        "model.norm": "layernorm",
        "model.learned_positions": True,
        "model.mlp.kind": "gelu",
        "model.mlp.dim": 4 * size.dim,
        "model.mlp.bias": True,
        "model.mlp.approximate_gelu": True,
    }


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(arg, name="transformer", mixer={"name": "transformer"}, settings=settings)
