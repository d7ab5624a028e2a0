"""Top-1 Element (arXiv 2505.18522, section 4): the value of the single best key, straight-through gradient.

python -m seqjax.main --config=configs/top1_element.py

200 steps at 110m on one H200: 5.81 / 5.91 nats in domain (docs/mixers.md). No full run yet.
"""

from configs import common

MIXER = {
    "name": "top1_element",
    "heads": 0,
    "kv_heads": 0,
    "head_dim": 0,
    "position": "rope",
    "rope_base": 0.0,
    "qk_norm": True,
    "bias": False,
    "v_grad": "hard",
    "implementation": None,
}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="top1_element", mixer=MIXER)
