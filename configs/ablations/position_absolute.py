"""Transformer++ with learned absolute positions in place of RoPE.

python -m seqjax.main --config=configs/ablations/position_absolute.py
"""

from configs import common
from configs.transformer_pp import MIXER


def model(size):
    """A table of positions is added to the embeddings."""
    del size
    return {"learned_positions": True}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="position_absolute", mixer=MIXER | {"position": "none"}, model=model)
