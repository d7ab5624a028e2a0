"""Transformer++ with learned absolute positions, a table added to the embeddings, in place of RoPE.

seqjax train --config=ablations/position_absolute   demo: not run
seqjax train --config=ablations/position_absolute:110m

Not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(
        arg,
        name="position_absolute",
        base="transformer_pp",
        settings={"model.mixer.position": "none", "model.learned_positions": True},
    )
