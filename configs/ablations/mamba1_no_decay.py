"""Mamba-1 that forgets nothing: the state is a sum.

python -m seqjax.main --config=configs/ablations/mamba1_no_decay.py
"""

from configs import common
from configs.mamba1 import MIXER, model


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="mamba1_no_decay", mixer=MIXER | {"decay": "none"}, model=model)
