"""Preconditioned KDA: written keys are scaled by their curvature.

arXiv 2604.21100; the shape is flash-linear-attention's.

    seqjax train --config=precond_kda
    seqjax train --config=precond_kda:110m

Results: lab/results/mixers.md
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    It keeps the heads and the MLP width of the size.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="precond_kda", mixer={"name": "precond_kda"}, settings=settings)
