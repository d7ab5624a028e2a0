"""Transformer++ whose queries and keys are trained tables over positions (a factorised Synthesizer).

seqjax train --config=ablations/const_qk     demo: not run
seqjax train --config=ablations/const_qk:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(arg, name="const_qk", base="transformer_pp", settings={"model.mixer.const": "qk"})
