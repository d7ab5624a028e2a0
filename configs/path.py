"""PaTH attention: positions are products of data-dependent matrices.

arXiv 2505.16381.

    seqjax train --config=path
    seqjax train --config=path:110m
    seqjax train --config=path:110m,model.mixer.forget_gate=True

The last command is the paper's PaTH-FoX, with FoX's forget gates.

Results: lab/results/all_mixers.md
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="path",
        mixer={"name": "path"},
        settings={
            "model.norm_eps": 1e-6,
            "model.mlp.kind": "swiglu",
            "model.mlp.rescale_init": False,
        },
    )
