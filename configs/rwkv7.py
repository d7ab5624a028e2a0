"""RWKV-7 (arXiv 2503.14456) in its own block: LayerNorm, token shift, ChannelMix with squared ReLU.

    seqjax train --config=rwkv7
    seqjax train --config=rwkv7:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return what differs from a Transformer++ of this size; ChannelMix is 4 times as wide as the model."""
    return {
        "model.norm": "layernorm",
        "model.embed_norm": True,
        "model.init": "rwkv",
        "model.mlp.dim": 4 * size.dim,
    }


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="rwkv7", mixer={"name": "rwkv7"}, settings=settings)
