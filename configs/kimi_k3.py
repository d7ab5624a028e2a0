"""Kimi K3: three KDA layers with bounded decays and full-rank gates, then gated MLA.

arXiv 2510.26692 (KDA); the changes follow the ports of Kimi K3 in vLLM and torchtitan. Kimi K3's MLPs are mixtures of
experts; here each layer has a SwiGLU. The third command adds its attention residuals.

    seqjax train --config=kimi_k3
    seqjax train --config=kimi_k3:110m
    seqjax train --config=kimi_k3:110m,model.attn_residual=4

Results: lab/results/mixers.md
"""

from seqjax import presets

KDA = {"name": "kda", "norm_eps": 1e-5, "lower_bound": -5.0, "gate_rank": "full"}
MLA = {"name": "mla", "position": "none", "gate": True}


def settings(size: presets.Size):
    """Return the differences from a Transformer++ of this size, with a multiple of four layers.

    KDA has 6 heads at width 768, not 12. The rank of MLA's queries is half the width.
    """
    heads = 6 if size.dim == 768 else size.heads
    values = {
        "model.n_layers": 4 * max(1, round(size.n_layers / 4)),
        "model.norm_eps": 1e-5,
        "model.mlp.kind": "swiglu",
        "model.mlp.rescale_init": False,
        "model.mlp.dim": 8 * (7 * size.dim // 24),
    }
    values["model.mixer[3].q_rank"] = size.dim // 2
    return values | {f"model.mixer[{i}].heads": heads for i in range(3)}


def get_config(arg: str = ""):
    """Return the config for `SIZE[,REGIME][,key=value ...]` (see seqjax.presets)."""
    return presets.get_config(arg, name="kimi_k3", mixer=(KDA, KDA, KDA, MLA), settings=settings)
