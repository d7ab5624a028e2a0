"""Mamba-2 without decay and without convolution; the SiLU remains.

arXiv 2505.18522, section 3, figure 3(b); the study is configs/studies/figure3b.py.

    seqjax train --config=ablations/mamba2_no_decay_no_conv
    seqjax train --config=ablations/mamba2_no_decay_no_conv:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="mamba2_no_decay_no_conv",
        base="mamba2",
        settings={"model.mixer.decay": "none", "model.mixer.conv": False},
    )
