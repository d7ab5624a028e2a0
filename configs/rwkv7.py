"""RWKV-7 (arXiv 2503.14456) in its own block: LayerNorm, token shift, ChannelMix with squared ReLU.

python -m seqjax.main --config=configs/rwkv7.py

200 steps at 110m on one H200: 4.93 / 5.02 nats in domain (docs/mixers.md). No full run yet.
"""

from configs import common

MIXER = {
    "name": "rwkv7",
    "heads": 0,
    "decay_rank": 0,
    "eta_rank": 0,
    "value_rank": 0,
    "gate_rank": 0,
    "chunk_size": 64,
}


def model(size: dict) -> dict:
    """What differs from a Transformer++ of this size: ChannelMix is 4 times as wide as the model."""
    return {
        "norm": "layernorm",
        "embed_norm": True,
        "init": "rwkv",
        "mlp.dim": 4 * size["dim"],
    }


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="rwkv7", mixer=MIXER, model=model)
