"""MoBA, Mixture of Block Attention: the query's block and top mean-key blocks.

arXiv 2502.13189.

    seqjax train --config=moba
    seqjax train --config=moba:110m

This is Top-1 Chunk's approximate selection without QK norm, with several chunks. The paper's top-k counts the query's
block: its 3 of 16 blocks of 512, at 8,192 tokens, correspond to `top_k=2` and blocks of 128 at 2,048 tokens. As in the
paper's code, the output has no norm.

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="moba",
        mixer={"name": "top1_chunk", "selection": "approx", "top_k": 2, "qk_norm": False},
        settings=lambda size: {"model.mixer.chunk_size": size.chunk_size},
    )
