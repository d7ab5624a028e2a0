"""Top-1 Chunk, exact selection (arXiv 2505.18522, section 5). Approx: `:demo,model.mixer.selection=approx`.

seqjax train --config=top1_chunk             two CPU cores, busy, 8 minutes: prose 1.83, doctest 1.64 nats
seqjax train --config=top1_chunk:110m

On one H200 110m trains at 499k tokens/s at batch 16 of 2,048 (docs/results/mixers.md). An older run with the
`xla` backend alone, 1,580 steps of 65,536 tokens, took 7m22s and ended at 3.11 nats on CommonCrawl and 2.95 on C4
(docs/results/first_110m.md has the settings). The paper's length and the other sizes: not run.
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg,
        name="top1_chunk",
        mixer={"name": "top1_chunk"},
        settings=lambda size: {"model.mixer.chunk_size": size.chunk_size},
    )
