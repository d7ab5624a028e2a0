"""Gated attention without positions: QK norm and an output gate per channel.

arXiv 2505.06708, with the layer of Qwen3-Next but without RoPE. Only the causal mask carries position information.

    seqjax train --config=gated_attention
    seqjax train --config=gated_attention:110m

Results: lab/results/mixers.md
"""

from seqjax import presets

ATTENTION = {
    "name": "transformer_pp",
    "position": "none",
    "qk_norm": True,
    "qk_norm_eps": 1e-6,
    "gate": True,
    "rescale_init": False,
}


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    The MLP is 7/3 of the width, not 8/3: with the gate, a layer has as many parameters as Transformer++'s.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": 7 * size.dim // 3,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="gated_attention", mixer=ATTENTION, settings=settings)
