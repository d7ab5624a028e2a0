"""Mamba-1: two mixer layers per Transformer layer, no MLP.

arXiv 2312.00752. The residual stream is float32.

    seqjax train --config=mamba1
    seqjax train --config=mamba1:110m

Results: lab/results/mixers.md, lab/results/limited_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from Transformer++."""
    return {
        "model.n_layers": 2 * size.n_layers,
        "model.mlp.kind": "none",
        "model.mlp.dim": None,
        "model.residual_dtype": "float32",
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="mamba1", mixer={"name": "mamba1", "chunk_size": 32}, settings=settings)
