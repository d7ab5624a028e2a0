"""Transformer++: full causal attention, the paper's reference. Sliding window: `:110m,model.mixer.window=256`.

seqjax train --config=transformer_pp         two CPU cores, busy, 7 minutes: prose 1.92, doctest 1.74 nats
seqjax train --config=transformer_pp:110m

On one H200 110m trains at 514k tokens/s at batch 16 of 2,048 (docs/results/mixers.md). An older run of 1,580
steps of 65,536 tokens took 4m18s (412k tokens/s) and ended at 3.20 nats on CommonCrawl and 3.04 on C4, at 3.13 and 2.96
with QK norm (docs/results/first_110m.md has the settings). The paper's length and the other sizes: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="transformer_pp", mixer={"name": "transformer_pp"})
