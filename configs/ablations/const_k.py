"""Transformer++ whose keys are a trained table over positions, not computed from the input.

arXiv 2505.18522, section 3, figure 3(e); the study is configs/studies/figure3e.py.

    seqjax train --config=ablations/const_k
    seqjax train --config=ablations/const_k:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="const_k", base="transformer_pp", settings={"model.mixer.const": "k"})
