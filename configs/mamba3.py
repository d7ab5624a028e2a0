"""Mamba-3, SISO: a trapezoidal state space with data-dependent rotations.

arXiv 2603.15569. Every layer has an MLP.

    seqjax train --config=mamba3
    seqjax train --config=mamba3:110m
    seqjax train --config=mamba3:110m,model.n_layers=24,model.mlp.kind=none

The SwiGLU is 11/16 as wide as Transformer++'s MLP, because the mixer is larger than attention: 109.4M parameters at
110m. The third command is a model without MLPs, like Mamba-2, with 116.3M parameters.

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from Transformer++."""
    return {
        "model.mlp.kind": "swiglu",
        "model.mlp.dim": (size.mlp_dim or 8 * size.dim // 3) * 11 // 16,
        "model.residual_dtype": "float32",
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="mamba3", mixer={"name": "mamba3"}, settings=settings)
