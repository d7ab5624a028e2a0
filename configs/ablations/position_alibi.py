"""Transformer++ with ALiBi in place of RoPE.

seqjax train --config=ablations/position_alibi   two CPU cores, busy, 7 minutes: prose 2.02, doctest 1.82 nats
seqjax train --config=ablations/position_alibi:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg, name="position_alibi", base="transformer_pp", settings={"model.mixer.position": "alibi"}
    )
