"""Parallax: softmax attention with a learned first-order correction of its values.

arXiv 2605.29157; the shape is flash-linear-attention's.

    seqjax train --config=parallax
    seqjax train --config=parallax:110m

Results: lab/results/mixers.md
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    The second query has as many parameters as a third of the model width in the MLP's three matrices.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": (size.mlp_dim or 8 * size.dim // 3) - size.dim // 3,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="parallax", mixer={"name": "parallax"}, settings=settings)
