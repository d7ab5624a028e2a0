"""Transformer++ without position encoding, except for the causal mask.

arXiv 2505.18522, section 3, figure 3(c); the study is configs/studies/figure3c.py.

    seqjax train --config=ablations/position_none
    seqjax train --config=ablations/position_none:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg, name="position_none", base="transformer_pp", settings={"model.mixer.position": "none"}
    )
