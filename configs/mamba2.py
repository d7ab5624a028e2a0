"""Mamba-2: two mixers for each Transformer layer, no MLP, float32 residual stream (arXiv 2405.21060).

python -m seqjax.main --config=configs/mamba2.py

200 steps at 110m on one H200: 4.96 / 5.08 nats in domain (docs/mixers.md). No full run yet.
"""

from configs import common

MIXER = {
    "name": "mamba2",
    "expand": 2,
    "head_dim": 64,
    "state": 128,
    "conv_width": 4,
    "conv": True,
    "decay": "full",
    "norm": True,
    "chunk_size": 128,
}


def model(size):
    """What differs from Transformer++."""
    return {"n_layers": 2 * size["layers"], "mlp.kind": "none", "mlp.dim": 0, "residual_dtype": "float32"}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="mamba2", mixer=MIXER, model=model)
