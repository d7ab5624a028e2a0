"""Hybrids by ratio at 110M: Gated DeltaNet, KDA and Mamba-2 with another mixer.

    seqjax study --study=hybrids --out=runs/hybrids --jobs=2

Every second, fourth or eighth layer has the second mixer: full attention (once with QK norm), a window or Top-1 Chunk.
Gated DeltaNet and KDA have 12 layers with MLPs; a ratio of 7 to 1 would need 8 or 16 layers. Mamba-2 and its hybrid
have 24 layers without MLPs. Kimi Linear (arXiv 2510.26692) is KDA with attention in every fourth layer, a model of
trunks_110m. Settings and models without a change are as in `trunks_110m`. Each hybrid uses the tuned learning rate of
its majority mixer.

Results: lab/results/hybrids
"""

from seqjax import presets


def _groups(mixer, other, *, every):
    return f"model.mixer={(*[mixer] * (every - 1), other)}"


# As in these mixers' configs: a size gives groups of mixers its number of heads, and Mamba-2 none.
DELTANET, KDA, MAMBA2 = {"name": "gated_deltanet", "heads": 6}, {"name": "kda", "heads": 6}, {"name": "mamba2"}
ATTENTION = {"name": "transformer_pp"}
MODELS = {
    "Gated DeltaNet": {
        "attention 1 in 2": _groups(DELTANET, ATTENTION, every=2),
        "attention 1 in 4": _groups(DELTANET, ATTENTION, every=4),
        # Attention in the other hybrids has RoPE without QK norm; Top-1 Chunk has both.
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
ENDS = (0.65, 0.8, 1.0)  # at the second end a hybrid may be below attention's last in-domain loss


def get_study():
    """Return the title, references, domains and runs."""
    trunks = presets.load("studies/trunks_110m")
    beside = (trunks.PUBLISHED, trunks.SAME_BLOCK, "Top-1 Chunk, exact", "KDA, attention 1 in 4")
    title = "110M parameters, limited regime: hybrids by ratio"
    return trunks.variants("hybrids", MODELS, title=title, ends=ENDS, beside=beside)
