"""MesaNet: linear attention with the optimal regularised read.

arXiv 2506.05233; the shape is flash-linear-attention's.

    seqjax train --config=mesa_net
    seqjax train --config=mesa_net:110m

Results: lab/results/mixers.md
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="mesa_net",
        mixer={"name": "mesa_net"},
        settings={"model.norm_eps": 1e-6, "model.mlp.kind": "swiglu", "model.mlp.rescale_init": False},
    )
