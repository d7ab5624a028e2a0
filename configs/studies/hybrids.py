"""Hybrids by ratio at 110M: Gated DeltaNet, KDA and Mamba-2 with another mixer in one layer of two, four or eight.

    seqjax study --study=hybrids --out=runs/hybrids --jobs=2

The other mixer, full attention (once with QK norm), a window or Top-1 Chunk, is that of the last layer of each group.
Gated DeltaNet and KDA have 12 layers with MLPs, of which 7 to 1 would need 8 or 16; Mamba-2 has 24 layers without MLPs,
and so has its hybrid. Kimi Linear (arXiv 2510.26692) is KDA with attention in one layer of four, a model of
trunks_110m. The settings and the models without a change are that study's. Each hybrid has the best rate there of its
majority mixer.

Results: lab/results/hybrids
"""

from seqjax import presets


def _groups(mixer, other, *, every):
    return f"model.mixer={(*[mixer] * (every - 1), other)}"


# As in their own configs: a size gives groups of mixers its number of heads, and Mamba-2 none.
DELTANET, KDA, MAMBA2 = {"name": "gated_deltanet", "heads": 6}, {"name": "kda", "heads": 6}, {"name": "mamba2"}
ATTENTION = {"name": "transformer_pp"}
MODELS = {
    "Gated DeltaNet": {
        "attention 1 in 2": _groups(DELTANET, ATTENTION, every=2),
        "attention 1 in 4": _groups(DELTANET, ATTENTION, every=4),
        # The attention of the others has RoPE alone, and Top-1 Chunk has both.
        "QK norm 1 in 4": _groups(DELTANET, ATTENTION | {"qk_norm": True}, every=4),
        "W=256 1 in 4": _groups(DELTANET, ATTENTION | {"window": 256}, every=4),
        "Top-1 Chunk 1 in 4": _groups(DELTANET, {"name": "top1_chunk", "chunk_size": 128}, every=4),
    },
    "KDA": {"attention 1 in 2": _groups(KDA, ATTENTION, every=2)},
    "Mamba-2": {
        "attention 1 in 4": _groups(MAMBA2, ATTENTION, every=4),
        "attention 1 in 8": _groups(MAMBA2, ATTENTION, every=8),
    },
}
ENDS = (0.65, 0.8, 1.0)  # at the second one a hybrid may be below attention's last loss in domain


def get_study():
    """Return the title, references, domains and runs."""
    trunks = presets.load("studies/trunks_110m")
    beside = (trunks.PUBLISHED, trunks.SAME_BLOCK, "Top-1 Chunk, exact", "KDA, attention 1 in 4")
    title = "110M parameters, limited regime: hybrids by ratio"
    return trunks.variants("hybrids", MODELS, title=title, ends=ENDS, beside=beside)
