"""Transformer++ with ALiBi in place of RoPE.

python -m seqjax.main --config=configs/ablations/position_alibi.py
"""

from configs import common
from configs.transformer_pp import MIXER


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="position_alibi", mixer=MIXER | {"position": "alibi"})
