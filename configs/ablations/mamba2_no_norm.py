"""Mamba-2 without the norm after its gate.

seqjax train --config=ablations/mamba2_no_norm   two CPU cores, 9 minutes: prose 1.55, doctest 1.40 nats
seqjax train --config=ablations/mamba2_no_norm:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="mamba2_no_norm", base="mamba2", settings={"model.mixer.norm": False})
