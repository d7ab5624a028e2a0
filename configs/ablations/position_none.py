"""Transformer++ without position encoding; only the causal mask carries position information.

seqjax train --config=ablations/position_none   demo: not run
seqjax train --config=ablations/position_none:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(
        arg, name="position_none", base="transformer_pp", settings={"model.mixer.position": "none"}
    )
