"""KDA, Kimi Delta Attention: the delta rule with a decay per key channel.

arXiv 2510.26692. All layers are KDA.

    seqjax train --config=kda
    seqjax train --config=kda:110m
    seqjax train --config=kda:110m,model.mixer.heads=12,model.mixer.channel_gates=True,model.mlp.dim=1536

The third command is Gated DeltaNet-2 (arXiv 2605.22791), with 112.0M parameters at 110m.

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    KDA has 6 heads at width 768, not 12.
    """
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mixer.heads": 6 if size.dim == 768 else size.heads,
    }


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="kda", mixer={"name": "kda"}, settings=settings)
