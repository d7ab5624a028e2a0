"""RWKV-7's block around attention (arXiv 2505.18522, 100k tokens): full, window, top1_exact (default) or top1_approx.

python -m seqjax.main --config=configs/rwkv7_shell.py:135m_100k,model.mixer.core=window
"""

from configs import common, rwkv7

MIXER = {
    "name": "rwkv7_shell",
    "heads": 0,
    "core": "top1_exact",
    "window": 256,
    "select_chunk": 0,
    "rope_base": 0.0,
    "value_rank": 0,
    "gate_rank": 0,
    "key_init": 1.0,
    "shell": {"shift": True, "vres": True, "gate": True, "lnx": True},
    "implementation": None,
}


def model(size: dict) -> dict:
    """RWKV-7's model; the chunk that Top-1 selects comes from the size."""
    return rwkv7.model(size) | {"mixer.select_chunk": size["chunk_size"]}


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="rwkv7_shell", mixer=MIXER, model=model)
