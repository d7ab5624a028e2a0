"""TTT-Linear: the state is a linear model that takes gradient steps on the tokens of the sequence.

arXiv 2407.04620; the shape is ttt-lm-jax's 125m-TTT.

    seqjax train --config=ttt_linear
    seqjax train --config=ttt_linear:110m

Results: lab/results/mixers.md
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="ttt_linear",
        mixer={"name": "ttt_linear"},
        settings={"model.norm_eps": 1e-6, "model.mlp.kind": "swiglu", "model.mlp.rescale_init": False},
    )
