"""Top-1 Chunk, exact selection (arXiv 2505.18522, section 5). Approx: `:demo,model.mixer.selection=approx`.

python -m seqjax.main --config=configs/top1_chunk.py         two CPU cores, 3 minutes: prose 1.81, doctest 1.79
python -m seqjax.main --config=configs/top1_chunk.py:110m    one H200, 237k tokens/s: 1,580 steps in docs/reproduce.md

The other sizes have not been run.
"""

from configs import common

MIXER = {
    "name": "top1_chunk",
    "heads": 0,
    "kv_heads": 0,
    "head_dim": 0,
    "position": "rope",
    "rope_base": 0.0,
    "qk_norm": True,
    "bias": False,
    "chunk_size": 0,
    "selection": "exact",
    "implementation": None,
}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="top1_chunk", mixer=MIXER)
