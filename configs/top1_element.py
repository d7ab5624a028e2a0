"""Top-1 Element (arXiv 2505.18522, section 4): the value of the single best key, straight-through gradient.

seqjax train --config=top1_element           two CPU cores, busy, 7 minutes: prose 2.13, doctest 1.99 nats
seqjax train --config=top1_element:110m

On one H200 110m trains at 433k tokens/s, and 200 steps at batch 16 of 2,048 end at 5.81 nats on CommonCrawl and 5.91
on C4 (docs/results/mixers.md has the settings). A full run and the other sizes: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="top1_element", mixer={"name": "top1_element"})
