"""Mamba-1 without decay and without convolution (its SiLU stays).

python -m seqjax.main --config=configs/ablations/mamba1_no_decay_no_conv.py:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(
        arg,
        name="mamba1_no_decay_no_conv",
        base="mamba1",
        settings={"model.mixer.decay": "none", "model.mixer.conv": False},
    )
