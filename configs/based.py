"""Based: of five layers one Taylor linear attention, one window attention, three gated convolutions (arXiv 2402.18668).

Linear attention at layers 1, 6, 11 and window attention at 2, 7, 12 of 15, SwiGLU of twice the width in every layer,
float32 residual stream.

python -m seqjax.main --config=configs/based.py

200 steps at the debug size on a CPU; steps at 110m timed on one H200 (docs/mixers.md). No full run yet.
"""

from configs import common

CONV = {"name": "based_conv", "expand": 2, "conv_width": 3}
LINEAR = {"name": "based_linear", "heads": 0, "feature_dim": 16, "chunk_size": 128}
WINDOW = {
    "name": "transformer_pp",
    "heads": 0,
    "kv_heads": 0,
    "head_dim": 0,
    "position": "rope",
    "rope_base": 0.0,
    "qk_norm": False,
    "bias": False,
    "window": 128,
    "implementation": None,
}


def model(size):
    """What differs from Transformer++: 15 layers for its 12."""
    layers = 5 * max(1, round(size["layers"] / 4))
    return {"n_layers": layers, "mlp.kind": "swiglu", "mlp.dim": 2 * size["dim"], "residual_dtype": "float32"}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    pattern = (CONV, LINEAR, WINDOW, CONV, CONV)
    return common.get_config(arg, name="based", mixer=LINEAR, pattern=pattern, model=model)
