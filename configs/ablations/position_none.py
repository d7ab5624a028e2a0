"""Transformer++ without position encoding: the causal mask alone.

python -m seqjax.main --config=configs/ablations/position_none.py
"""

from configs import common
from configs.transformer_pp import MIXER


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="position_none", mixer=MIXER | {"position": "none"})
