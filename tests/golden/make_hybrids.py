"""Makes NAME.npz of the attention and Gated DeltaNet layers of published hybrids in `LAYERS`, with gradients.

    pip install torch==2.13.0 numpy transformers==5.23.0; python tests/golden/make_hybrids.py

The layers are transformers' modules on a CPU, in float32, with a causal mask and random parameters.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

HERE, BATCH, TIME, DIM = Path(__file__).parent, 2, 19, 8
SIZES: Any = {"hidden_size": DIM, "num_attention_heads": 2, "num_hidden_layers": 4, "max_position_embeddings": 32}
ROPE = {"rope_type": "default", "rope_theta": 100.0}


def kimi_mla() -> tuple[Any, Any]:
    sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "q_lora_rank": None}
    return KimiLinearConfig(**SIZES, **sizes, num_key_value_heads=2), kimi.KimiLinearAttention


def deepseek_mla() -> tuple[Any, Any]:
    sizes = {"kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 9, "q_lora_rank": 4}
    config = DeepseekV3Config(**SIZES, **sizes, num_key_value_heads=2, rope_parameters=ROPE)
    return config, deepseek.DeepseekV3Attention


def qwen_config() -> Any:
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    linear |= {"linear_key_head_dim": 3, "linear_value_head_dim": 2}
    rope = ROPE | {"partial_rotary_factor": 0.5}
    return Qwen3NextConfig(**SIZES, **linear, num_key_value_heads=1, head_dim=8, rope_parameters=rope)


def olmo_block() -> tuple[Any, Any]:
    config = OlmoHybridConfig(**SIZES, num_key_value_heads=1, intermediate_size=12, rope_parameters=ROPE)
    return config, olmo.OlmoHybridAttentionDecoderLayer


def plain(names: dict[str, str]) -> Any:
    """Return a function that renames and transposes the arrays of a module's parameters."""

    def renamed(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        assert sorted(arrays) == sorted(f"{theirs}.weight" for theirs in names.values()), sorted(arrays)
        found = {ours: arrays[f"{theirs}.weight"] for ours, theirs in names.items()}
        return {f"{ours}.w" if x.ndim > 1 else f"{ours}.g": x.T if x.ndim > 1 else x for ours, x in found.items()}

    return renamed


def qwen_attention(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per head, the rows of `q_proj` are the query's and then the gate's; the gains of q and k are 1 + w."""
    q, gate = arrays["q_proj.weight"].unflatten(0, (2, 2, 8)).unbind(1)
    out = {"q.w": q.flatten(0, 1).T, "gate.w": gate.flatten(0, 1).T, "out.w": arrays["o_proj.weight"].T}
    out |= {f"{name}.w": arrays[f"{name}_proj.weight"].T for name in "kv"}
    return out | {f"{name}_norm.g": arrays[f"{name}_norm.weight"] for name in "qk"}


def qwen_deltanet(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of fused projections are ordered by key head; one convolution covers q, k and v."""
    parts = arrays["in_proj_qkvz.weight"].unflatten(0, (2, 3 + 3 + 4 + 4)).split([3, 3, 4, 4], dim=1)
    out = {f"{ours}.w": part.flatten(0, 1).T for ours, part in zip(("q", "k", "v", "gate"), parts, strict=True)}
    parts = arrays["in_proj_ba.weight"].unflatten(0, (2, 4)).split([2, 2], dim=1)
    out |= {f"{ours}.w": part.flatten(0, 1).T for ours, part in zip(("beta", "decay"), parts, strict=True)}
    taps = arrays["conv1d.weight"][:, 0].split([6, 6, 8])
    out |= {f"{name}_conv.w": part for name, part in zip("qkv", taps, strict=True)}
    out |= {"norm.g": arrays["norm.weight"], "out.w": arrays["out_proj.weight"].T}
    return out | {"log_rate_H": arrays["A_log"], "step_bias_H": arrays["dt_bias"]}


MLA = {"kv_in": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv": "kv_b_proj", "out": "o_proj"}
OLMO = {f"mixer.{name}": f"self_attn.{name}_proj" for name in "qkv"} | {"mixer.out": "self_attn.o_proj"}
OLMO |= {f"mixer.{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
OLMO |= {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}
OLMO |= {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
# name: the layer, its rotary embedding, and our names of its parameters
LAYERS: Any = {
    "mla": (kimi_mla, None, plain(MLA | {"q": "q_proj"})),
    "mla_rope": (
        deepseek_mla,
        deepseek.DeepseekV3RotaryEmbedding,
        plain(MLA | {"q_in": "q_a_proj", "q_norm": "q_a_layernorm", "q": "q_b_proj"}),
    ),
    "qwen3_attention": (
        lambda: (qwen_config(), qwen.Qwen3NextAttention),
        qwen.Qwen3NextRotaryEmbedding,
        qwen_attention,
    ),
    "qwen3_deltanet": (lambda: (qwen_config(), qwen.Qwen3NextGatedDeltaNet), None, qwen_deltanet),
    "olmo_block": (olmo_block, olmo.OlmoHybridRotaryEmbedding, plain(OLMO)),
}


def arrays_of(name: str) -> dict[str, Tensor]:
    """Input, output, and the gradients of sum(output * weight), with parameters in our names and orientation."""
    make, rotary, ours = LAYERS[name]
    config, layer = make()
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    module = layer(config, 0)
    for parameter in module.parameters():
        parameter.data = parameter.data.float() + 0.5 * torch.randn_like(parameter)
    if name == "qwen3_deltanet":
        module.A_log.data = torch.randn(4)
    x, weight = torch.randn(BATCH, TIME, DIM, requires_grad=True), torch.randn(BATCH, TIME, DIM)
    inputs: Any = {"attention_mask": torch.full((TIME, TIME), -torch.inf).triu(1)[None, None]}
    if name == "qwen3_deltanet":
        inputs = {}
    if rotary is not None:
        inputs["position_embeddings"] = rotary(config)(x, torch.arange(TIME)[None])
    y = module(hidden_states=x, **inputs)
    y = y[0] if isinstance(y, tuple) else y
    (y * weight).sum().backward()
    arrays = {"x": x, "y": y, "weight": weight, "dx": x.grad}
    parameters = dict(module.named_parameters())
    values = ours({key: value.data for key, value in parameters.items()})
    if name == "qwen3_attention":
        values |= {key: 1 + value for key, value in values.items() if key.endswith(".g")}
    gradients = ours({key: value.grad for key, value in parameters.items()})
    return arrays | {f"p.{k}": v for k, v in values.items()} | {f"g.{k}": v for k, v in gradients.items()}


for name in LAYERS:
    kept = {key: value.detach().numpy() for key, value in arrays_of(name).items()}
    np.savez_compressed(HERE / f"{name}.npz", **kept)
