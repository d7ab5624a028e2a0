"""mLSTM, xLSTM's matrix memory, in the block of xLSTM 7B.

arXiv 2405.04517 and 2503.13427.

    seqjax train --config=mlstm
    seqjax train --config=mlstm:110m

Results: lab/results/trunks_110m
"""

from seqjax import presets

SETTINGS = {
    "model.norm_eps": 1e-6,
    "model.mlp.kind": "swiglu",
    "model.mixer.heads": 4,  # at every width
}


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="mlstm", mixer={"name": "mlstm"}, settings=SETTINGS)
