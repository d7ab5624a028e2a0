"""DeltaNet (arXiv 2406.06484): linear attention with the delta rule, in flash-linear-attention's shape.

seqjax train --config=deltanet               two CPU cores, busy, 8 minutes: prose 1.93, doctest 1.74 nats
seqjax train --config=deltanet:110m

On one H200 110m trains at 309k tokens/s, and 200 steps at batch 16 of 2,048 end at 5.81 nats on CommonCrawl and 5.91
on C4 (docs/results/mixers.md has the settings). A full run and the other sizes: not run.
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return what differs from a Transformer++ of this size; DeltaNet has 8 heads at a width of 768, not 12."""
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mixer.heads": 8 if size.dim == 768 else size.heads,
    }


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="deltanet", mixer={"name": "deltanet"}, settings=settings)
