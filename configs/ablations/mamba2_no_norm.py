"""Mamba-2 without the norm behind its gate.

python -m seqjax.main --config=configs/ablations/mamba2_no_norm.py
"""

from configs import common
from configs.mamba2 import MIXER, model


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="mamba2_no_norm", mixer=MIXER | {"norm": False}, model=model)
