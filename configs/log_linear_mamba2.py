"""Log-linear Mamba-2: states of blocks of 1, 2, 4, ... tokens, with weights by level (arXiv 2506.04761).

    seqjax train --config=log_linear_mamba2
    seqjax train --config=log_linear_mamba2:110m

Otherwise as Mamba-2: two mixers for each Transformer layer, no MLP, float32 residual stream.
Results: docs/results/all_mixers.md
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    mixer, settings = {"name": "log_linear_mamba2"}, presets.load("mamba2").settings
    return presets.get_config(arg, name="log_linear_mamba2", mixer=mixer, settings=settings)
