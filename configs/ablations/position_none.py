"""Transformer++ without position encoding; only the causal mask carries position information.

arXiv 2505.18522, section 3, figure 3(c); the study is configs/studies/figure3c.py.

    seqjax train --config=ablations/position_none
    seqjax train --config=ablations/position_none:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg, name="position_none", base="transformer_pp", settings={"model.mixer.position": "none"}
    )
