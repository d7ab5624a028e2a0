"""Transformer++ whose queries and keys are trained tables over positions (a factorised Synthesizer).

seqjax train --config=ablations/const_qk     two CPU cores, busy, 5 minutes: prose 2.64, doctest 2.57 nats
seqjax train --config=ablations/const_qk:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="const_qk", base="transformer_pp", settings={"model.mixer.const": "qk"})
