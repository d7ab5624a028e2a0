"""Mamba-1 whose channels and states share one decay per token.

seqjax train --config=ablations/mamba1_one_decay   two CPU cores, busy, 10 minutes: prose 1.57, doctest 1.41 nats
seqjax train --config=ablations/mamba1_one_decay:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="mamba1_one_decay", base="mamba1", settings={"model.mixer.decay": "one"})
