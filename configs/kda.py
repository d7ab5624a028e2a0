"""KDA, Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay per key channel, in every layer.

    seqjax train --config=kda
    seqjax train --config=kda:110m
    seqjax train --config=kda:110m,model.mixer.heads=12,model.mixer.channel_gates=True,model.mlp.dim=1536

The third command is Gated DeltaNet-2 (arXiv 2605.22791), of 112.0M parameters at 110m.
Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return what differs from a Transformer++ of this size; KDA has 6 heads at a width of 768, not 12."""
    return {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mixer.heads": 6 if size.dim == 768 else size.heads,
    }


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="kda", mixer={"name": "kda"}, settings=settings)
