"""Mamba-2 without decay, i.e. linear attention with a gate.

arXiv 2505.18522, section 3, figure 3(b); the study is configs/studies/figure3b.py.

    seqjax train --config=ablations/mamba2_no_decay
    seqjax train --config=ablations/mamba2_no_decay:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="mamba2_no_decay", base="mamba2", settings={"model.mixer.decay": "none"})
