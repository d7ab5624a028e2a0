"""Mamba-2 without decay, i.e. linear attention with a gate.

seqjax train --config=ablations/mamba2_no_decay   two CPU cores, 8 minutes: prose 1.66, doctest 1.51 nats
seqjax train --config=ablations/mamba2_no_decay:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="mamba2_no_decay", base="mamba2", settings={"model.mixer.decay": "none"})
