"""FoX, the Forgetting Transformer: softmax attention with a forget gate and no positions (arXiv 2503.02130).

    seqjax train --config=fox
    seqjax train --config=fox:110m

The paper's Pro block has keys and values mixed with those before, norms, an output gate and a smaller MLP: set
model.mixer.kv_shift, model.mixer.qk_norm and model.mixer.output_gate to True, and model.mlp.dim to 1792 at 110m.

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg,
        name="fox",
        mixer={"name": "fox"},
        settings={"model.norm_eps": 1e-6, "model.mlp.kind": "swiglu", "model.mlp.rescale_init": False},
    )
