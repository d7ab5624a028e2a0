"""Mamba-1: two mixers for each Transformer layer, no MLP, float32 residual stream (arXiv 2312.00752).

python -m seqjax.main --config=configs/mamba1.py

200 steps at 110m on one H200: 4.91 / 5.02 nats in domain (docs/mixers.md). No full run yet.
"""

from configs import common

MIXER = {
    "name": "mamba1",
    "expand": 2,
    "state": 16,
    "dt_rank": 0,
    "conv_width": 4,
    "conv": True,
    "decay": "full",
    "chunk_size": 32,
}


def model(size):
    """What differs from Transformer++."""
    return {"n_layers": 2 * size["layers"], "mlp.kind": "none", "mlp.dim": 0, "residual_dtype": "float32"}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="mamba1", mixer=MIXER, model=model)
