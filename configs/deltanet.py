"""DeltaNet (arXiv 2406.06484): linear attention with the delta rule, in flash-linear-attention's shape.

python -m seqjax.main --config=configs/deltanet.py

200 steps at 110m on one H200: 5.81 / 5.91 nats in domain (docs/mixers.md). No full run yet.
"""

from configs import common

MIXER = {
    "name": "deltanet",
    "heads": 0,
    "key_dim": 0,
    "value_dim": 0,
    "conv_width": 4,
    "norm_eps": 1e-6,
    "chunk_size": 64,
}


def model(size: dict) -> dict:
    """What differs from a Transformer++ of this size; DeltaNet has 8 heads at a width of 768, not 12."""
    return {
        "norm_eps": 1e-6,
        "mlp.kind": "swiglu",
        "mlp.rescale_init": False,
        "mixer.heads": 8 if size["dim"] == 768 else size["heads"],
    }


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="deltanet", mixer=MIXER, model=model)
