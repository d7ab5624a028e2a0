"""Based: of five layers one Taylor linear attention, one window attention, three gated convolutions (arXiv 2402.18668).

Linear attention at layers 1, 6, 11 and window attention at 2, 7, 12 of 15, SwiGLU of twice the width in every layer,
float32 residual stream.

    seqjax train --config=based
    seqjax train --config=based:110m

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets

CONV = {"name": "based_conv"}
LINEAR = {"name": "based_linear"}
WINDOW = {"name": "transformer_pp", "window": 128}


def settings(size: presets.Size):
    """Return what differs from Transformer++, among others 15 layers instead of 12."""
    return {
        "model.n_layers": 5 * max(1, round(size.n_layers / 4)),
        "model.mlp.kind": "swiglu",
        "model.mlp.dim": 2 * size.dim,
        "model.residual_dtype": "float32",
    }


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="based", mixer=(CONV, LINEAR, WINDOW, CONV, CONV), settings=settings)
