"""Hybrids at 110M: Mamba-2 with full attention in one layer of four and of eight, Gated DeltaNet with Top-1 Chunk.

    seqjax study --study=hybrids:demo --out=runs/hybrids      small, paper: the same command with that size

The other mixer is that of the last layer of each four or eight. Mamba-2 has 24 layers without MLPs, and so has its
hybrid; Gated DeltaNet has 12 with MLPs. `demo` has models of eight layers.

Results: docs/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study of a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    names = (*paper.REFERENCES, "Mamba-2", "Gated DeltaNet", "Top-1 Chunk, exact")
    mamba2, attention = {"name": "mamba2"}, {"name": "transformer_pp"}
    # As in their own configs: a size gives groups of mixers its number of heads, and no chunk size.
    deltanet = {"name": "gated_deltanet"} | ({} if size == "demo" else {"heads": 6})
    top1 = {"name": "top1_chunk", "chunk_size": 16 if size == "demo" else 128}
    models = {name: paper.MODELS[name] for name in names}
    models |= {
        "Mamba-2, attention 1 in 4": _hybrid(mamba2, attention, every=4),
        "Mamba-2, attention 1 in 8": _hybrid(mamba2, attention, every=8),
        "Gated DeltaNet, Top-1 Chunk 1 in 4": _hybrid(deltanet, top1, every=4),
    }
    deeper = {"settings": "model.n_layers=8", "folder": "eight-layers"} if size == "demo" else {}
    return paper.study("Hybrids at 110M, limited regime", models, size=size, **deeper)


def _hybrid(mixer, other, *, every):
    return f"{mixer['name']},model.mixer={(*[mixer] * (every - 1), other)}"
