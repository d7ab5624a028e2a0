"""Mamba-1 without decay: the state is a plain sum.

arXiv 2505.18522, section 3, figure 3(a); the study is configs/studies/figure3a.py.

    seqjax train --config=ablations/mamba1_no_decay
    seqjax train --config=ablations/mamba1_no_decay:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="mamba1_no_decay", base="mamba1", settings={"model.mixer.decay": "none"})
