"""Based: Taylor linear attention, window attention and gated convolutions, 1:1:3.

arXiv 2402.18668. Of 15 layers, 1, 6 and 11 have linear attention, 2, 7 and 12 window attention, and the rest gated
convolutions. Every layer has a SwiGLU of twice the width; the residual stream is float32.

    seqjax train --config=based
    seqjax train --config=based:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets

CONV = {"name": "based_conv"}
LINEAR = {"name": "based_linear"}
WINDOW = {"name": "transformer_pp", "window": 128}


def settings(size: presets.Size):
    """Return the differences from Transformer++, including 15 layers instead of 12."""
    return {
        "model.n_layers": 5 * max(1, round(size.n_layers / 4)),
        "model.mlp.kind": "swiglu",
        "model.mlp.dim": 2 * size.dim,
        "model.residual_dtype": "float32",
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="based", mixer=(CONV, LINEAR, WINDOW, CONV, CONV), settings=settings)
