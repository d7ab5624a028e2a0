"""RWKV-7's block around attention (arXiv 2505.18522, figure 7).

The attention is full, window, top1_exact (default), top1_best_key, top1_best_key_int8 or top1_approx.

    seqjax train --config=rwkv7_shell
    seqjax train --config=rwkv7_shell:135m_100k,model.mixer.core=window

Results: lab/results/mixers.md, lab/results/limited_110m, lab/results/books_16k, lab/results/table3.md
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="rwkv7_shell",
        base="rwkv7",
        mixer={"name": "rwkv7_shell"},
        settings=lambda size: {"model.mixer.chunk_size": size.chunk_size},
    )
