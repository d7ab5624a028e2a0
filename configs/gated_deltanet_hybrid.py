"""Reference hybrid: three Gated DeltaNet layers, then gated attention without positions.

arXiv 2412.06464 and 2505.06708. Attention is as in configs/gated_attention.py. Three configs switch one of its parts:
`ablations/hybrid_no_gate`, `ablations/hybrid_rope` and `ablations/hybrid_no_qk_norm`.

    seqjax train --config=gated_deltanet_hybrid
    seqjax train --config=gated_deltanet_hybrid:110m

Results: lab/results/mixers.md
"""

from seqjax import presets

DELTANET = {"name": "gated_deltanet"}
ATTENTION = {
    "name": "transformer_pp",
    "position": "none",
    "qk_norm": True,
    "qk_norm_eps": 1e-6,
    "gate": True,
    "rescale_init": False,
}


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size, with a multiple of four layers.

    Gated DeltaNet has 6 heads at width 768, not 12.
    """
    heads = 6 if size.dim == 768 else size.heads
    values = {
        "model.n_layers": 4 * max(1, round(size.n_layers / 4)),
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": 8 * (25 * size.dim // 96),
    }
    return values | {f"model.mixer[{i}].heads": heads for i in range(3)}


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg, name="gated_deltanet_hybrid", mixer=(DELTANET, DELTANET, DELTANET, ATTENTION), settings=settings
    )
