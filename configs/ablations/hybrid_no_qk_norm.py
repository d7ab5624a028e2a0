"""The reference hybrid without the norm of q and k in its attention.

arXiv 2412.06464 and 2505.06708; the other parts are as in configs/gated_deltanet_hybrid.py.

    seqjax train --config=ablations/hybrid_no_qk_norm
    seqjax train --config=ablations/hybrid_no_qk_norm:110m

Results: lab/results/mixers.md
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="hybrid_no_qk_norm",
        base="gated_deltanet_hybrid",
        settings={"model.mixer[3].qk_norm": False},
    )
