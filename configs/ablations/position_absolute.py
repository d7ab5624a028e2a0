"""Transformer++ with learned absolute positions, a table added to the embeddings, in place of RoPE.

seqjax train --config=ablations/position_absolute   two CPU cores, busy, 7 minutes: prose 2.64, doctest 2.56 nats
seqjax train --config=ablations/position_absolute:110m

At 110m and larger: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg,
        name="position_absolute",
        base="transformer_pp",
        settings={"model.mixer.position": "none", "model.learned_positions": True},
    )
