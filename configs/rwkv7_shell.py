"""RWKV-7's block around attention (arXiv 2505.18522, 100k tokens): full, window, top1_exact (default) or top1_approx.

seqjax train --config=rwkv7_shell            two CPU cores, busy, 8 minutes: prose 1.77, doctest 1.60 nats
seqjax train --config=rwkv7_shell:135m_100k,model.mixer.core=window

On one H200 110m with top1_exact trains at 398k tokens/s, and 200 steps at batch 16 of 2,048 end at 5.01 nats on
CommonCrawl and 5.06 on C4 (docs/results/mixers.md has the settings). At 135m_100k the step was timed for every core
(docs/results/kernels.md). A full run of any size: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg,
        name="rwkv7_shell",
        base="rwkv7",
        mixer={"name": "rwkv7_shell"},
        settings=lambda size: {"model.mixer.chunk_size": size.chunk_size},
    )
