"""Transformer++ with unit queries and keys at a fixed temperature; sweep `model.mixer.temperature`.

The entropy of the weights is measured at the end.

python -m seqjax.main --config=configs/ablations/temperature.py
"""

from configs import common
from configs.transformer_pp import MIXER


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="temperature", mixer=MIXER | {"temperature": 1.0}, entropy=True)
