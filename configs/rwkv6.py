"""RWKV-6: LayerNorm, a norm on the embedding, ChannelMix of 3.5 times the width (arXiv 2404.05892).

    seqjax train --config=rwkv6
    seqjax train --config=rwkv6:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets

# What differs from Transformer++; the block brings its own MLP.
SETTINGS = {
    "model.mlp.kind": "none",
    "model.mlp.dim": None,
    "model.norm": "layernorm",
    "model.embed_norm": True,
    "model.init": "rwkv",
}


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="rwkv6", mixer={"name": "rwkv6"}, settings=SETTINGS)
