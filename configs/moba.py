"""MoBA, Mixture of Block Attention (arXiv 2502.13189): the own block and those of the best mean keys.

    seqjax train --config=moba
    seqjax train --config=moba:110m

It is Top-1 Chunk's approximate selection without QK norm, with several chunks. The paper's top-k counts the own block:
its 3 of 16 blocks, at 8,192 tokens blocks of 512, are `top_k=2` and blocks of 128 at 2,048 tokens. There is no norm of
the output, as in the paper's code.

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg,
        name="moba",
        mixer={"name": "top1_chunk", "selection": "approx", "top_k": 2, "qk_norm": False},
        settings=lambda size: {"model.mixer.chunk_size": size.chunk_size},
    )
