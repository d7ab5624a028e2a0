"""Kimi Linear: three KDA layers, then MLA without positions.

arXiv 2510.26692; transformers, `models/kimi_linear`. Kimi Linear's MLPs are mixtures of experts; here each layer has a
SwiGLU. KDA's output gate has the bias of flash-linear-attention's layer.

    seqjax train --config=kimi_linear
    seqjax train --config=kimi_linear:110m

Results: lab/results/mixers.md
"""

from seqjax import presets

# The norm of MLA's latent has eps 1e-6, its default, also in the public code.
KDA, MLA = {"name": "kda", "norm_eps": 1e-5}, {"name": "mla", "position": "none"}


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size, with a multiple of four layers.

    KDA has 6 heads at width 768, not 12.
    """
    heads = 6 if size.dim == 768 else size.heads
    values = {
        "model.n_layers": 4 * max(1, round(size.n_layers / 4)),
        "model.norm_eps": 1e-5,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": 8 * (31 * size.dim // 96),
    }
    return values | {f"model.mixer[{i}].heads": heads for i in range(3)}


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="kimi_linear", mixer=(KDA, KDA, KDA, MLA), settings=settings)
