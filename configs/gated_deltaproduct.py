"""Gated DeltaProduct: Gated DeltaNet with two delta-rule steps per token.

arXiv 2502.10297.

    seqjax train --config=gated_deltaproduct
    seqjax train --config=gated_deltaproduct:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    The key width is half the model width (the default), the value width five eighths. With two steps a layer's
    projections then have 4 D^2 entries, like attention's. There are 4 heads at width 768, not 12.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mixer.heads": 4 if size.dim == 768 else size.heads,
        "model.mixer.value_dim": 5 * size.dim // 8,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="gated_deltaproduct", mixer={"name": "gated_deltaproduct"}, settings=settings)
