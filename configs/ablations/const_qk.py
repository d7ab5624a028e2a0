"""Transformer++ with queries and keys from trained position tables.

This is a factorised Synthesizer: arXiv 2505.18522, section 3, figure 3(e); the study is configs/studies/figure3e.py.

    seqjax train --config=ablations/const_qk
    seqjax train --config=ablations/const_qk:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="const_qk", base="transformer_pp", settings={"model.mixer.const": "qk"})
