"""DeltaNet: linear attention with the delta rule.

arXiv 2406.06484; the shape is flash-linear-attention's.

    seqjax train --config=deltanet
    seqjax train --config=deltanet:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    DeltaNet has 8 heads at width 768, not 12.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mixer.heads": 8 if size.dim == 768 else size.heads,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="deltanet", mixer={"name": "deltanet"}, settings=settings)
