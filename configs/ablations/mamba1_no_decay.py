"""Mamba-1 without decay: the state is a plain sum.

seqjax train --config=ablations/mamba1_no_decay   demo: not run
seqjax train --config=ablations/mamba1_no_decay:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(arg, name="mamba1_no_decay", base="mamba1", settings={"model.mixer.decay": "none"})
