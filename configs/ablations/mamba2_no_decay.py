"""Mamba-2 without decay: linear attention with an output gate.

arXiv 2505.18522, section 3, figure 3(b); the study is configs/studies/figure3b.py.

    seqjax train --config=ablations/mamba2_no_decay
    seqjax train --config=ablations/mamba2_no_decay:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="mamba2_no_decay", base="mamba2", settings={"model.mixer.decay": "none"})
