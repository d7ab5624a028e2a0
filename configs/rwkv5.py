"""RWKV-5: LayerNorm, a norm on the embedding, ChannelMix 3.5 times the width.

arXiv 2404.05892.

    seqjax train --config=rwkv5
    seqjax train --config=rwkv5:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets

# Differences from Transformer++; the RWKV block contains ChannelMix as its MLP.
SETTINGS = {
    "model.mlp.kind": "none",
    "model.mlp.dim": None,
    "model.norm": "layernorm",
    "model.embed_norm": True,
    "model.init": "rwkv",
}


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="rwkv5", mixer={"name": "rwkv5"}, settings=SETTINGS)
