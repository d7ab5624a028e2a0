"""Mamba-1 that forgets nothing: the state is a sum.

python -m seqjax.main --config=configs/ablations/mamba1_no_decay.py:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """`arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(arg, name="mamba1_no_decay", base="mamba1", settings={"model.mixer.decay": "none"})
