"""Transformer++ with keys from a trained position table instead of the input.

arXiv 2505.18522, section 3, figure 3(e); the study is configs/studies/figure3e.py.

    seqjax train --config=ablations/const_k
    seqjax train --config=ablations/const_k:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="const_k", base="transformer_pp", settings={"model.mixer.const": "k"})
