"""Transformer++ without position encoding; only the causal mask carries position information.

seqjax train --config=ablations/position_none   two CPU cores, busy, 7 minutes: prose 2.63, doctest 2.54 nats
seqjax train --config=ablations/position_none:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg, name="position_none", base="transformer_pp", settings={"model.mixer.position": "none"}
    )
