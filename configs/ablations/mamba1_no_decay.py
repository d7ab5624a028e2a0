"""Mamba-1 without decay: the state is a plain sum.

seqjax train --config=ablations/mamba1_no_decay   two CPU cores, busy, 9 minutes: prose 1.61, doctest 1.43 nats
seqjax train --config=ablations/mamba1_no_decay:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="mamba1_no_decay", base="mamba1", settings={"model.mixer.decay": "none"})
