"""Mamba-2 without decay and without convolution (its SiLU stays).

seqjax train --config=ablations/mamba2_no_decay_no_conv   two CPU cores, 8 minutes: prose 2.63, doctest 2.53 nats
seqjax train --config=ablations/mamba2_no_decay_no_conv:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg,
        name="mamba2_no_decay_no_conv",
        base="mamba2",
        settings={"model.mixer.decay": "none", "model.mixer.conv": False},
    )
