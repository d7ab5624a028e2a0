"""RWKV-5: LayerNorm, a norm on the embedding, ChannelMix of 3.5 times the width (arXiv 2404.05892).

seqjax train --config=rwkv5                  two CPU cores, busy, 9 minutes: prose 1.81, doctest 1.64 nats
seqjax train --config=rwkv5:110m

On one H200 110m trains at 307k tokens/s, and 200 steps at batch 16 of 2,048 end at 5.33 nats on CommonCrawl and 5.43
on C4 (docs/results/mixers.md has the settings). A full run and the other sizes: not run.
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
    return presets.get_config(arg, name="rwkv5", mixer={"name": "rwkv5"}, settings=SETTINGS)
