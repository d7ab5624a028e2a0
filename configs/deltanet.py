"""DeltaNet (arXiv 2406.06484): linear attention with the delta rule, in flash-linear-attention's shape.

    seqjax train --config=deltanet
    seqjax train --config=deltanet:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
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
