"""Transformer++: full causal attention, the paper's reference.

arXiv 2505.18522, section 2 and appendix A.

    seqjax train --config=transformer_pp
    seqjax train --config=transformer_pp:110m
    seqjax train --config=transformer_pp:110m,model.mixer.window=256

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="transformer_pp", mixer={"name": "transformer_pp"})
