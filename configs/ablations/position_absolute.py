"""Transformer++ with learned absolute positions instead of RoPE.

The positions are a table added to the embeddings. arXiv 2505.18522, section 3, figure 3(c); the study is
configs/studies/figure3c.py.

    seqjax train --config=ablations/position_absolute
    seqjax train --config=ablations/position_absolute:110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="position_absolute",
        base="transformer_pp",
        settings={"model.mixer.position": "none", "model.learned_positions": True},
    )
