"""Mamba-2: two mixers for each Transformer layer, no MLP, float32 residual stream (arXiv 2405.21060).

python -m seqjax.main --config=configs/mamba2.py:110m

One H200, 305k tokens/s; 200 steps end at 4.96 / 5.08 nats in domain (docs/mixers.md, with the settings). A full run and
the other sizes: not run.
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
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(arg, name="mamba2", mixer={"name": "mamba2"}, settings=settings)
