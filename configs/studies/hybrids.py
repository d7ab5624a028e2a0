"""Hybrids at 110M: Gated DeltaNet and KDA with another mixer in one layer of two and four, Mamba-2 of four and eight.

    seqjax study --study=hybrids:demo --out=runs/hybrids      small, paper: the same command with that size

The other mixer, full attention, a window or Top-1 Chunk, is that of the last layer of each group. Gated DeltaNet and
KDA have 12 layers with MLPs, of which 7 to 1 would need 8 or 16; Mamba-2 has 24 layers without MLPs, and so has its
hybrid. `demo` has models of eight layers. Kimi Linear (arXiv 2510.26692) is KDA with attention in one layer of four.

Results: docs/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study of a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    names = (*paper.REFERENCES, "Mamba-2", "Gated DeltaNet", "Top-1 Chunk, exact")
    mamba2, attention = {"name": "mamba2"}, {"name": "transformer_pp"}
    # As in their own configs: a size gives groups of mixers its number of heads, and no chunk size.
    heads = {} if size == "demo" else {"heads": 6}
    deltanet, kda = ({"name": name} | heads for name in ("gated_deltanet", "kda"))
    top1 = {"name": "top1_chunk", "chunk_size": 16 if size == "demo" else 128}
    width = presets.pick(paper.WINDOW, size, kind="size of the study")
    window = attention | {"window": width}
    models = {name: paper.MODELS[name] for name in names} | {"KDA": "kda"}
    models |= {
        f"{label}, attention 1 in {every}": _hybrid(mixer, attention, every=every)
        for label, mixer in (("Gated DeltaNet", deltanet), ("KDA", kda))
        for every in (2, 4)
    }
    models |= {
        f"Gated DeltaNet, W={width} 1 in 4": _hybrid(deltanet, window, every=4),
        "Mamba-2, attention 1 in 4": _hybrid(mamba2, attention, every=4),
        "Mamba-2, attention 1 in 8": _hybrid(mamba2, attention, every=8),
        "Gated DeltaNet, Top-1 Chunk 1 in 4": _hybrid(deltanet, top1, every=4),
    }
    deeper = {"settings": "model.n_layers=8", "folder": "eight-layers"} if size == "demo" else {}
    return paper.study("Hybrids at 110M, limited regime", models, size=size, **deeper)


def _hybrid(mixer, other, *, every):
    return f"{mixer['name']},model.mixer={(*[mixer] * (every - 1), other)}"
