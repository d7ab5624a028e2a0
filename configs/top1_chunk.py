"""Top-1 Chunk: attention to the local chunk and to one selected past chunk.

arXiv 2505.18522, section 5. The selection is exact by default.

    seqjax train --config=top1_chunk
    seqjax train --config=top1_chunk:110m
    seqjax train --config=top1_chunk:110m,model.mixer.selection=approx
    seqjax train --config=top1_chunk:110m,model.mixer.chunk_size=64,model.mixer.top_k=4
    seqjax train --config=top1_chunk:110m,model.mixer.selection=shortlist,model.mixer.table=mean_eigen

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="top1_chunk",
        mixer={"name": "top1_chunk"},
        settings=lambda size: {"model.mixer.chunk_size": size.chunk_size},
    )
