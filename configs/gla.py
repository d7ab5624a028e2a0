"""GLA, gated linear attention: a data-dependent decay per key channel.

arXiv 2312.06635.

    seqjax train --config=gla
    seqjax train --config=gla:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets

SETTINGS = {
    "model.norm_eps": 1e-6,
    "model.mlp.kind": "swiglu",
    "model.mlp.rescale_init": False,
    "model.mixer.heads": 4,  # at every width
}


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="gla", mixer={"name": "gla"}, settings=SETTINGS)
