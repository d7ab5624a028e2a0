"""Log-linear Mamba-2: states of blocks of 1, 2, 4, ... tokens, with weights by level (arXiv 2506.04761).

    seqjax train --config=log_linear_mamba2
    seqjax train --config=log_linear_mamba2:110m

Otherwise as Mamba-2: two mixers for each Transformer layer, no MLP, float32 residual stream.
Results: lab/results/all_mixers.md
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return what differs from Transformer++: as Mamba-2, with the backward pass of one layer at a time in memory."""
    return presets.load("mamba2").settings(size) | {"model.scan_layers": True}


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="log_linear_mamba2", mixer={"name": "log_linear_mamba2"}, settings=settings)
