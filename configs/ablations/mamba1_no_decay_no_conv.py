"""Mamba-1 without decay and without convolution (its SiLU stays).

python -m seqjax.main --config=configs/ablations/mamba1_no_decay_no_conv.py
"""

from configs import common
from configs.mamba1 import MIXER, model


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(
        arg, name="mamba1_no_decay_no_conv", mixer=MIXER | {"decay": "none", "conv": False}, model=model
    )
