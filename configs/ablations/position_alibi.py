"""Transformer++ with ALiBi in place of RoPE.

seqjax train --config=ablations/position_alibi   demo: not run
seqjax train --config=ablations/position_alibi:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(
        arg, name="position_alibi", base="transformer_pp", settings={"model.mixer.position": "alibi"}
    )
