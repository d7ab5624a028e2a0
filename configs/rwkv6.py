"""RWKV-6: LayerNorm, a norm on the embedding, ChannelMix of 3.5 times the width (arXiv 2404.05892).

python -m seqjax.main --config=configs/rwkv6.py

200 steps at 110m on one H200: 5.25 / 5.35 nats in domain (docs/mixers.md). No full run yet.
"""

from configs import common

MIXER = {"name": "rwkv6", "head_dim": 64, "chunk_size": 64, "shift_rank": 32, "decay_rank": 64}


def model(size):
    """What differs from Transformer++; the block brings its own MLP."""
    del size
    return {"mlp.kind": "none", "mlp.dim": 0, "norm": "layernorm", "embed_norm": True, "init": "rwkv"}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="rwkv6", mixer=MIXER, model=model)
