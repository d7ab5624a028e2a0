"""Mamba-2 that forgets nothing: linear attention with a gate.

python -m seqjax.main --config=configs/ablations/mamba2_no_decay.py
"""

from configs import common
from configs.mamba2 import MIXER, model


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="mamba2_no_decay", mixer=MIXER | {"decay": "none"}, model=model)
