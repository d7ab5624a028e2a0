"""Top-1 Element (arXiv 2505.18522, section 4): the value of the single best key, straight-through gradient.

python -m seqjax.main --config=configs/top1_element.py:110m

One H200, 433k tokens/s; 200 steps end at 5.81 / 5.91 nats in domain (docs/mixers.md, with the settings). The paper's
length and the other sizes: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(arg, name="top1_element", mixer={"name": "top1_element"})
