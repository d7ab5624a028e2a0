"""Wall attention: softmax attention with a decay per key channel in place of positions.

Tilde Research, without an arXiv page; the shape is flash-linear-attention's.

    seqjax train --config=wall
    seqjax train --config=wall:110m

Results: lab/results/mixers.md
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    The decays' projection has as many parameters as a third of the model width in the MLP's three matrices.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": (size.mlp_dim or 8 * size.dim // 3) - size.dim // 3,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="wall", mixer={"name": "wall"}, settings=settings)
