"""Transformer++ whose keys are a trained table over positions, not computed from the input.

python -m seqjax.main --config=configs/ablations/const_k.py
"""

from configs import common
from configs.transformer_pp import MIXER


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="const_k", mixer=MIXER | {"const": "k"})
