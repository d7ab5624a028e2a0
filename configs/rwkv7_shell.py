"""RWKV-7's block around attention (arXiv 2505.18522, 100k tokens): full, window, top1_exact (default) or top1_approx.

python -m seqjax.main --config=configs/rwkv7_shell.py:135m_100k,model.mixer.core=window

Not run at that size. At 110m with top1_exact on one H200, 398k tokens/s; 200 steps end at 5.01 / 5.06 nats in domain
(docs/mixers.md, with the settings).
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/presets.py)."""
    return presets.get_config(
        arg,
        name="rwkv7_shell",
        base="rwkv7",
        mixer={"name": "rwkv7_shell"},
        settings=lambda size: {"model.mixer.chunk_size": size.chunk_size},
    )
