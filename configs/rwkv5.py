"""RWKV-5: LayerNorm, a norm on the embedding, ChannelMix of 3.5 times the width (arXiv 2404.05892).

python -m seqjax.main --config=configs/rwkv5.py

200 steps at 110m on one H200: 5.33 / 5.43 nats in domain (docs/mixers.md). No full run yet.
"""

from configs import common

MIXER = {"name": "rwkv5", "head_dim": 64, "chunk_size": 64}


def model(size):
    """What differs from Transformer++; the block brings its own MLP."""
    del size
    return {"mlp.kind": "none", "mlp.dim": 0, "norm": "layernorm", "embed_norm": True, "init": "rwkv"}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="rwkv5", mixer=MIXER, model=model)
