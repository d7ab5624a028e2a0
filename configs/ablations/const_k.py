"""Transformer++ whose keys are a trained table over positions, not computed from the input.

seqjax train --config=ablations/const_k      demo: not run
seqjax train --config=ablations/const_k:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(arg, name="const_k", base="transformer_pp", settings={"model.mixer.const": "k"})
