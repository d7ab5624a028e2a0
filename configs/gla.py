"""GLA, gated linear attention (arXiv 2312.06635): a decay per key channel from the data, without correction.

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
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="gla", mixer={"name": "gla"}, settings=SETTINGS)
