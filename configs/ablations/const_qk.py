"""Transformer++ whose queries and keys are trained tables over positions (a factorised Synthesizer).

python -m seqjax.main --config=configs/ablations/const_qk.py
"""

from configs import common
from configs.transformer_pp import MIXER


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="const_qk", mixer=MIXER | {"const": "qk"})
