"""Log-linear Mamba-2: states for blocks of 1, 2, 4, ... tokens, level weights.

arXiv 2506.04761. As in Mamba-2, there are two mixer layers per Transformer layer, no MLP, and a float32 residual
stream.

    seqjax train --config=log_linear_mamba2
    seqjax train --config=log_linear_mamba2:110m

Results: lab/results/all_mixers.md
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg, name="log_linear_mamba2", mixer={"name": "log_linear_mamba2"}, settings=presets.load("mamba2").settings
    )
