"""Hybrids by ratio at 110M: Gated DeltaNet, KDA and Mamba-2 with another mixer in one layer of two, four or eight.

    seqjax study --study=hybrids --out=runs/hybrids --jobs=2

The other mixer, full attention, a window or Top-1 Chunk, is that of the last layer of each group. Gated DeltaNet and
KDA have 12 layers with MLPs, of which 7 to 1 would need 8 or 16; Mamba-2 has 24 layers without MLPs, and so has its
hybrid. Kimi Linear (arXiv 2510.26692) is KDA with attention in one layer of four, a model of trunks_110m. The settings
are those of that study, the rate of a hybrid is the best one there of what most of its layers are, and the models that
it is made of are that study's runs.

Results: docs/results/index.md
"""

from seqjax import presets

ATTENTION = {"name": "transformer_pp"}
# base -> what differs -> the last mixer of a group, and the layers of a group
MODELS = {
    "Gated DeltaNet": {
        "attention 1 in 2": (ATTENTION, 2),
        "attention 1 in 4": (ATTENTION, 4),
        "W=256 1 in 4": (ATTENTION | {"window": 256}, 4),
        "Top-1 Chunk 1 in 4": ({"name": "top1_chunk", "chunk_size": 128}, 4),
    },
    "KDA": {"attention 1 in 2": (ATTENTION, 2)},
    "Mamba-2": {"attention 1 in 4": (ATTENTION, 4), "attention 1 in 8": (ATTENTION, 8)},
}
ENDS = (0.65, 0.8, 1.0)  # at the second one a hybrid may be below attention's last loss in domain


def get_study():
    """Return the title, references, domains and runs."""
    trunks = presets.load("studies/trunks_110m")
    parts = trunks.at_best(*MODELS, trunks.PUBLISHED, trunks.SAME_BLOCK, "Top-1 Chunk, exact", "KDA, attention 1 in 4")
    runs = {}
    for label, run in parts.items():
        runs[label] = run
        base = trunks.MODELS[run["model"]].partition(":")[0]
        # As in its own config: a size gives groups of mixers its number of heads, and Mamba-2 none.
        own = {"name": base} if base == "mamba2" else {"name": base, "heads": 6}
        for name, (other, every) in MODELS.get(run["model"], {}).items():
            hybrid = label.replace(run["model"], f"{run['model']}, {name}")
            runs[hybrid] = run | {
                "workdir": f"runs/hybrids/{hybrid}".replace(" ", "_"),
                "config": f"{run['config']},train.ends={ENDS},model.mixer={(*[own] * (every - 1), other)}",
                "model": f"{run['model']}, {name}",
            }
    study = trunks.get_study() | {"title": "110M parameters, limited regime: hybrids by ratio", "runs": runs}
    del study["speeds"]  # of models that are not here
    return study
