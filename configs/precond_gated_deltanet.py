"""Preconditioned Gated DeltaNet: written keys are scaled by their curvature.

arXiv 2604.21100; the shape is flash-linear-attention's.

    seqjax train --config=precond_gated_deltanet
    seqjax train --config=precond_gated_deltanet:110m

Results: lab/results/mixers.md
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    Values are twice as wide as keys, so the MLP is a quarter narrower. There are 6 heads at width 768, not 12.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": (size.mlp_dim or 8 * size.dim // 3) * 3 // 4,
        "model.mixer.heads": 6 if size.dim == 768 else size.heads,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg, name="precond_gated_deltanet", mixer={"name": "precond_gated_deltanet"}, settings=settings
    )
