"""MLA, multi-head latent attention: keys and values from a latent of 288 numbers per token.

arXiv 2405.04434, section 2.1, with RoPE as in DeepSeek-V3.

    seqjax train --config=mla
    seqjax train --config=mla:110m
    seqjax train --config=mla:110m,model.mixer.position=none,model.mixer.gate=True,model.mlp.dim=1920

The third command is Kimi K3's layer, without positions and with an output gate; both have 109.8M parameters at 110m.

Results: lab/results/mixers.md
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    The MLP is 17/6 of the width, not 8/3, because MLA has fewer parameters than attention.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": 17 * size.dim // 6,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="mla", mixer={"name": "mla"}, settings=settings)
