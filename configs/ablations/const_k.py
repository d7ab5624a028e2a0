"""Transformer++ whose keys are a trained table over positions, not computed from the input.

seqjax train --config=ablations/const_k      two CPU cores, busy, 7 minutes: prose 2.64, doctest 2.56 nats
seqjax train --config=ablations/const_k:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="const_k", base="transformer_pp", settings={"model.mixer.const": "k"})
