"""Gated DeltaNet (arXiv 2412.06464): the delta rule on a state that decays, in flash-linear-attention's shape.

python -m seqjax.main --config=configs/gated_deltanet.py

200 steps at the debug size on a CPU; steps at 110m timed on one H200 (docs/mixers.md). No full run yet.
"""

from configs import common

MIXER = {
    "name": "gated_deltanet",
    "heads": 0,
    "key_dim": 0,
    "value_dim": 0,
    "conv_width": 4,
    "norm_eps": 1e-6,
    "chunk_size": 64,
}


def model(size: dict) -> dict:
    """What differs from a Transformer++ of this size; Gated DeltaNet has 6 heads at a width of 768, not 12."""
    return {
        "norm_eps": 1e-6,
        "mlp.kind": "swiglu",
        "mlp.rescale_init": False,
        "mixer.heads": 6 if size["dim"] == 768 else size["heads"],
    }


def get_config(arg: str = ""):
    """See configs/common.py for what `arg` may be."""
    return common.get_config(arg, name="gated_deltanet", mixer=MIXER, model=model)
