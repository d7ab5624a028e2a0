"""Qwen3-Next: three Gated DeltaNet layers, then gated attention.

arXiv 2412.06464 and 2505.06708; transformers, `models/qwen3_next`. In Gated DeltaNet two value heads share a key head.
Attention has few key heads, QK norm, RoPE on a quarter of each head, and an output gate. Qwen3-Next's MLPs are mixtures
of experts; here each layer has a SwiGLU. Decays start as in Gated DeltaNet.

    seqjax train --config=qwen3_next
    seqjax train --config=qwen3_next:110m

Results: lab/results/mixers.md
"""

from seqjax import presets

DELTANET = {"name": "gated_deltanet"}
ATTENTION = {
    "name": "transformer_pp",
    "rope_share": 0.25,
    "qk_norm": True,
    "qk_norm_eps": 1e-6,
    "gate": True,
    "rescale_init": False,
}


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size, with a multiple of four layers.

    At width 768, Gated DeltaNet has 6 key heads and 12 value heads of 128, attention 12 heads of 128 and 2 key heads.
    """
    heads = 6 if size.dim == 768 else size.heads
    values = {
        "model.n_layers": 4 * max(1, round(size.n_layers / 4)),
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": 8 * (3 * size.dim // 16),
    }
    deltanet = {"heads": heads, "value_heads": 2 * heads, "key_dim": size.dim, "value_dim": 2 * size.dim}
    values |= {f"model.mixer[{i}].{key}": value for i in range(3) for key, value in deltanet.items()}
    attention = {"kv_heads": max(1, size.heads // 6), "head_dim": 2 * size.dim // size.heads}
    return values | {f"model.mixer[3].{key}": value for key, value in attention.items()}


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg, name="qwen3_next", mixer=(DELTANET, DELTANET, DELTANET, ATTENTION), settings=settings
    )
