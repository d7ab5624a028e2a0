"""Mamba-1 whose channels and states share one decay per token.

seqjax train --config=ablations/mamba1_one_decay   demo: not run
seqjax train --config=ablations/mamba1_one_decay:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(arg, name="mamba1_one_decay", base="mamba1", settings={"model.mixer.decay": "one"})
