"""Mamba-1: two mixers for each Transformer layer, no MLP, float32 residual stream (arXiv 2312.00752).

    seqjax train --config=mamba1
    seqjax train --config=mamba1:110m

Results: lab/results/mixers.md, lab/results/limited_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return what differs from Transformer++."""
    return {
        "model.n_layers": 2 * size.n_layers,
        "model.mlp.kind": "none",
        "model.mlp.dim": None,
        "model.residual_dtype": "float32",
    }


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="mamba1", mixer={"name": "mamba1", "chunk_size": 32}, settings=settings)
