"""Transformer++ with unit queries and keys at a fixed temperature; sweep `model.mixer.temperature`.

The entropy of the attention weights is measured at the end; configs/studies/figure3f.py and figure4.py are the sweep.

seqjax train --config=ablations/temperature   two CPU cores, busy, 8 minutes: prose 1.97, doctest 1.79 nats
seqjax train --config=ablations/temperature:110m

At 110m: docs/results/figure4.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg,
        name="temperature",
        base="transformer_pp",
        settings=lambda size: {"model.mixer.temperature": 1.0, "eval.entropy_tokens": size.entropy_tokens},
    )
