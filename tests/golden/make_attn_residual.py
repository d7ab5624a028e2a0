"""Makes attn_residual.npz: flash-linear-attention's Transformer with attention residuals, and gradients.

    git clone https://github.com/fla-org/flash-linear-attention FLA && git -C FLA checkout bc3b101
    pip install torch==2.13.0 numpy einops transformers==5.23.0; python tests/golden/make_attn_residual.py FLA

The model's code orders the sub-layers; its kernel is replaced by fla's naive form, and attention (without positions)
and MLP are written here.
"""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

HERE, FLA, DIM, HEADS, LAYERS, INNER, VOCABULARY = Path(__file__).parent, Path(sys.argv[1]), 8, 2, 3, 12, 24


def stub(name: str, **contents: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


def load(path: str) -> Any:
    spec: Any = importlib.util.spec_from_file_location(path.replace("/", "."), FLA / f"fla/{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Attention(nn.Module):
    def __init__(self, hidden_size, **unused):
        super().__init__()
        for name in "qkvo":
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, hidden_size, bias=False))

    def forward(self, hidden_states, **unused):
        q, k, v = (getattr(self, f"{name}_proj")(hidden_states).unflatten(-1, (HEADS, -1)) for name in "qkv")
        o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(2)), None, None


class Mlp(nn.Module):
    def __init__(self, hidden_size, intermediate_size, **unused):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x, **unused):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def attnres(query, residuals, rms_weight, output_rms_weight, rms_eps):
    return load("ops/attnres/naive").naive_attnres(query, residuals, rms_weight, output_rms_weight, rms_eps)


stub("fla.layers.attn", Attention=Attention)
stub("fla.models.utils", Cache=None, FLAGenerationMixin=type("FLAGenerationMixin", (), {}))
stub("fla.modules", FusedCrossEntropyLoss=None, FusedLinearCrossEntropyLoss=None, RMSNorm=nn.RMSNorm, GatedMLP=Mlp)
stub("fla.modules.l2warp", l2_warp=None)
stub("fla.ops.attnres", fused_attnres=attnres)
configuration = load("models/transformer/configuration_transformer")
stub("fla.models.transformer.configuration_transformer", TransformerConfig=configuration.TransformerConfig)

LAYER = {
    "norm1.g": "attn_norm.weight", "norm2.g": "mlp_norm.weight", "mixer.q.w": "attn.q_proj.weight",
    "mixer.k.w": "attn.k_proj.weight", "mixer.v.w": "attn.v_proj.weight", "mixer.out.w": "attn.o_proj.weight",
    "mlp.gate.w": "mlp.gate_proj.weight", "mlp.up.w": "mlp.up_proj.weight", "mlp.down.w": "mlp.down_proj.weight",
    "mix1.query_D": "attn_res_proj.weight", "mix1.gain_D": "attn_res_norm.weight",
    "mix2.query_D": "mlp_res_proj.weight", "mix2.gain_D": "mlp_res_norm.weight",
}  # fmt: skip
MODEL = {"embed": "embeddings.weight", "norm.g": "norm.weight", "mix.query_D": "res_proj.weight"}
MODEL |= {"mix.gain_D": "res_norm.weight"}


def ours(name: str, x: torch.Tensor) -> torch.Tensor:
    """Our orientation: [in, out] of a matrix, [D] of a query."""
    return x.flatten() if name.endswith("query_D") else x.T if x.ndim == 2 and name != "embed" else x


def arrays_of(block_size: int) -> dict[str, torch.Tensor]:
    """Final hidden states, and the gradients of sum(hidden * weight), with parameters in our names."""
    torch.manual_seed(0)
    config = configuration.TransformerConfig(
        hidden_size=DIM, num_hidden_layers=LAYERS, num_heads=HEADS, intermediate_size=INNER, vocab_size=VOCABULARY,
        norm_eps=1e-5, fuse_norm=False, use_cache=False, attnres_block_size=block_size,
    )  # fmt: skip
    module = load("models/transformer/modeling_transformer").TransformerModel(config)
    for parameter in module.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    tokens, weight = torch.randint(VOCABULARY, (2, 7)), torch.randn(2, 7, DIM)
    hidden = module(tokens).last_hidden_state
    (hidden * weight).sum().backward()
    arrays = {"tokens": tokens, "hidden": hidden, "weight": weight}
    parameters = dict(module.named_parameters())
    for mine, theirs in MODEL.items():
        parameter = parameters.pop(theirs)
        arrays |= {f"p.{mine}": ours(mine, parameter), f"g.{mine}": ours(mine, parameter.grad)}
    for mine, theirs in LAYER.items():
        stack = [parameters.pop(f"layers.{i}.{theirs}") for i in range(LAYERS)]
        arrays[f"p.blocks.0.{mine}"] = torch.stack([ours(mine, x) for x in stack])
        # The first sub-layer has one source, so its query and gain have no gradient.
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in stack]
        arrays[f"g.blocks.0.{mine}"] = torch.stack([ours(mine, x) for x in grads])
    assert not parameters, parameters.keys()
    return arrays


kept = {f"{n}/{key}": x.detach().numpy() for n in (1, 2, 4) for key, x in arrays_of(n).items()}
np.savez_compressed(HERE / "attn_residual.npz", **kept)
