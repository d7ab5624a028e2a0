"""Top-1 Element: the value of the single best key, straight-through gradient.

arXiv 2505.18522, section 4.

    seqjax train --config=top1_element
    seqjax train --config=top1_element:110m

Results: lab/results/mixers.md, lab/results/limited_110m
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="top1_element", mixer={"name": "top1_element"})
