"""Transformer++: full causal attention, the paper's reference. Sliding window: `:110m,model.mixer.window=256`.

python -m seqjax.main --config=configs/transformer_pp.py:110m   one H200, 412k tokens/s: 1,580 steps, docs/reproduce.md

The other sizes have not been run.
"""

from configs import common

MIXER = {
    "name": "transformer_pp",
    "heads": 0,
    "kv_heads": 0,
    "head_dim": 0,
    "position": "rope",
    "rope_base": 0.0,
    "qk_norm": False,
    "bias": False,
    "window": 0,
    "const": "none",
    "temperature": 0.0,
    "implementation": None,
}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="transformer_pp", mixer=MIXER)
