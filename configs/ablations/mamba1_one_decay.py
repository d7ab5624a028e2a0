"""Mamba-1 whose channels and states share one decay per token.

python -m seqjax.main --config=configs/ablations/mamba1_one_decay.py
"""

from configs import common
from configs.mamba1 import MIXER, model


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="mamba1_one_decay", mixer=MIXER | {"decay": "one"}, model=model)
