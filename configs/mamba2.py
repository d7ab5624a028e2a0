"""Mamba-2: two mixers for each Transformer layer, no MLP, float32 residual stream (arXiv 2405.21060).

seqjax train --config=mamba2                 two CPU cores, 9 minutes: prose 1.59, doctest 1.44 nats
seqjax train --config=mamba2:110m

On one H200 110m trains at 305k tokens/s, and 200 steps at batch 16 of 2,048 end at 4.96 nats on CommonCrawl and 5.08
on C4 (docs/results/mixers.md has the settings). A full run and the other sizes: not run.
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return what differs from Transformer++."""
    return {
        "model.n_layers": 2 * size.n_layers,
        "model.mlp.kind": "none",
        "model.mlp.dim": None,
        "model.residual_dtype": "float32",
    }


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(arg, name="mamba2", mixer={"name": "mamba2"}, settings=settings)
