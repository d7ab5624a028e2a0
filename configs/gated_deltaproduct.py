"""Gated DeltaProduct (arXiv 2502.10297): Gated DeltaNet with two steps of the delta rule for every token.

    seqjax train --config=gated_deltaproduct
    seqjax train --config=gated_deltaproduct:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return what differs from a Transformer++ of this size.

    Keys are half as wide as the model, the default, and values five eighths: with two steps the projections of a layer
    have 4 D^2 entries, as those of attention have. At a width of 768 there are 4 heads, not 12.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mixer.heads": 4 if size.dim == 768 else size.heads,
        "model.mixer.value_dim": 5 * size.dim // 8,
    }


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="gated_deltaproduct", mixer={"name": "gated_deltaproduct"}, settings=settings)
