"""Mamba-2 with one decay per token, shared by all heads.

arXiv 2505.18522, section 3, figure 3(b); the study is configs/studies/figure3b.py.

    seqjax train --config=ablations/mamba2_one_decay
    seqjax train --config=ablations/mamba2_one_decay:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="mamba2_one_decay", base="mamba2", settings={"model.mixer.decay": "one"})
