"""Transformer: GPT with learned positions, biases, LayerNorm and a GELU MLP (the paper's first baseline).

seqjax train --config=transformer            two CPU cores, busy, 7 minutes: prose 2.65, doctest 2.56 nats
seqjax train --config=transformer:110m

On one H200 110m trains at 489k tokens/s, and 200 steps at batch 16 of 2,048 end at 5.83 nats on CommonCrawl and 5.90
on C4 (docs/results/mixers.md has the settings). A full run and the other sizes: not run.
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
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="transformer", mixer={"name": "transformer"}, settings=settings)
