"""FoX, the Forgetting Transformer: softmax attention with forget gates.

arXiv 2503.02130. There are no positions.

    seqjax train --config=fox
    seqjax train --config=fox:110m

The paper's Pro block mixes keys and values with the previous token's, adds norms and an output gate, and has a smaller
MLP. For it, set model.mixer.kv_shift, model.mixer.qk_norm and model.mixer.output_gate to True, and model.mlp.dim to
1792 at 110m.

Results: lab/results/mixers.md, lab/results/trunks_110m
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(
        arg,
        name="fox",
        mixer={"name": "fox"},
        settings={"model.norm_eps": 1e-6, "model.mlp.kind": "swiglu", "model.mlp.rescale_init": False},
    )
