"""Olmo Hybrid: three Gated DeltaNet layers, then attention in a post-norm block.

arXiv 2412.06464 and 2411.12537 (beta in (0, 2)); transformers, `models/olmo_hybrid`. Attention normalises q and k over
all heads. It has no positions, as in the release; `model.mixer[3].position=rope` gives it RoPE.

    seqjax train --config=olmo_hybrid
    seqjax train --config=olmo_hybrid:110m
    seqjax train --config=olmo_hybrid:110m,model.mixer[3].position=rope

Results: lab/results/mixers.md
"""

from seqjax import presets

DELTANET, ATTENTION = {"name": "gated_deltaproduct", "steps": 1, "norm_eps": 1e-5}, {"name": "post_norm_attention"}


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size, with a multiple of four layers.

    Gated DeltaNet has 6 heads at width 768, not 12, and values twice as wide as keys.
    """
    heads = 6 if size.dim == 768 else size.heads
    values = {
        "model.n_layers": 4 * max(1, round(size.n_layers / 4)),
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": 8 * (13 * size.dim // 48),
    }
    deltanet = {"heads": heads, "key_dim": 3 * size.dim // 4, "value_dim": 3 * size.dim // 2}
    return values | {f"model.mixer[{i}].{key}": value for i in range(3) for key, value in deltanet.items()}


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg, name="olmo_hybrid", mixer=(DELTANET, DELTANET, DELTANET, ATTENTION), settings=settings
    )
