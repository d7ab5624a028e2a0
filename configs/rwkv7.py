"""RWKV-7 in the RWKV block: LayerNorm, token shift, ChannelMix with squared ReLU.

arXiv 2503.14456.

    seqjax train --config=rwkv7
    seqjax train --config=rwkv7:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    ChannelMix is 4 times as wide as the model.
    """
    return {
        "model.norm": "layernorm",
        "model.embed_norm": True,
        "model.init": "rwkv",
        "model.mlp.dim": 4 * size.dim,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="rwkv7", mixer={"name": "rwkv7"}, settings=settings)
