"""Transformer++ with unit queries and keys at a fixed softmax temperature.

Sweep `model.mixer.temperature`. arXiv 2505.18522, section 3, figure 3(f); the study is configs/studies/figure3f.py. The
entropy of the attention weights is measured at the end (figure 4).

    seqjax train --config=ablations/temperature
    seqjax train --config=ablations/temperature:110m

Results: lab/results/mixers.md (demo), lab/results/figure4 (110m)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="temperature",
        base="transformer_pp",
        settings=lambda size: {"model.mixer.temperature": 1.0, "eval.entropy_tokens": size.entropy_tokens},
    )
