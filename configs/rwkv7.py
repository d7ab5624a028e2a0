"""RWKV-7 (arXiv 2503.14456) in its own block: LayerNorm, token shift, ChannelMix with squared ReLU.

seqjax train --config=rwkv7                  two CPU cores, 7 minutes: prose 1.73, doctest 1.56 nats
seqjax train --config=rwkv7:110m

On one H200 110m trains at 228k tokens/s, and 200 steps at batch 16 of 2,048 end at 4.93 nats on CommonCrawl and 5.02
on C4 (docs/results/mixers.md has the settings). A full run and the other sizes: not run.
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
