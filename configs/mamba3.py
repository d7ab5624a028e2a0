"""Mamba-3, SISO (arXiv 2603.15569): a trapezoidal state space with rotations from the data, and an MLP, in every layer.

    seqjax train --config=mamba3
    seqjax train --config=mamba3:110m
    seqjax train --config=mamba3:110m,model.n_layers=24,model.mlp.kind=none

The SwiGLU has 11/16 of the width of Transformer++'s MLP, because the mixer is larger than attention: 109.4M parameters
at 110m. The third command is a model without MLPs, as Mamba-2's, of 116.3M.
Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return what differs from Transformer++."""
    return {
        "model.mlp.kind": "swiglu",
        "model.mlp.dim": (size.mlp_dim or 8 * size.dim // 3) * 11 // 16,
        "model.residual_dtype": "float32",
    }


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="mamba3", mixer={"name": "mamba3"}, settings=settings)
