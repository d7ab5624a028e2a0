"""MSA, MiniMax Sparse Attention: a small index chooses blocks of keys.

arXiv 2606.13392.

    seqjax train --config=msa
    seqjax train --config=msa:110m

Results: lab/results/mixers.md
"""

from seqjax import presets


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size.

    Four query heads share a key head, if the size has four; the saved parameters widen the MLP. Up to 2,048 tokens,
    blocks are scaled down: at 2,048 tokens a query reads 8 blocks of 32. Longer sequences use MiniMax-M3's values, the
    defaults: 16 blocks of 128.
    """
    kv_heads = max(1, size.heads // 4)
    saved = 2 * (size.dim - size.dim * kv_heads // size.heads)  # columns of k and v; a gated MLP has three matrices
    values = {
        "model.norm_eps": 1e-6,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": (size.mlp_dim or 8 * size.dim // 3) + saved // 3,
        "model.mixer.kv_heads": kv_heads,
    }
    if size.seq_len <= 2048:
        values |= {"model.mixer.block_size": size.chunk_size // 4, "model.mixer.blocks": 8}
    return values


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="msa", mixer={"name": "msa"}, settings=settings)
