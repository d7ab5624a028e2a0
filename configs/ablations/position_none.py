"""Transformer++ without position encoding: the causal mask alone.

python -m seqjax.main --config=configs/ablations/position_none.py:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """`arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(
        arg, name="position_none", base="transformer_pp", settings={"model.mixer.position": "none"}
    )
