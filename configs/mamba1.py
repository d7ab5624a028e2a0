"""Mamba-1: two mixers for each Transformer layer, no MLP, float32 residual stream (arXiv 2312.00752).

seqjax train --config=mamba1                 two CPU cores, 10 minutes: prose 1.57, doctest 1.40 nats
seqjax train --config=mamba1:110m

On one H200 110m trains at 242k tokens/s, and 200 steps at batch 16 of 2,048 end at 4.91 nats on CommonCrawl and 5.02
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
    return presets.get_config(arg, name="mamba1", mixer={"name": "mamba1", "chunk_size": 32}, settings=settings)
