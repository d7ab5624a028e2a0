"""DSA, DeepSeek Sparse Attention: a small index chooses single keys.

DeepSeek-V3.2, arXiv 2512.02556, section 2.1.

    seqjax train --config=dsa
    seqjax train --config=dsa:110m
    seqjax train --config=dsa:110m --init_from=RUN      # the weights of a finished Transformer++ run, and a new index

A query reads an eighth of the training length, at most 2,048 keys as in the paper: 256 keys at 2,048 tokens.

Results: lab/results/mixers.md
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="dsa",
        mixer={"name": "dsa"},
        settings=lambda size: {"model.mixer.top_k": min(2048, size.seq_len // 8)},
    )
