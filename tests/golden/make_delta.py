"""Makes delta.npz: the delta-rule family as public code computes it, with gradients by torch's autograd, on a CPU.

Needs torch, einops, transformers (5.23), fla-core (0.6) and no triton; not the tests. Run it as it is.
fla's naive.py files are loaded by path, because importing `fla.ops` needs triton.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

OPS = Path(importlib.util.find_spec("fla").submodule_search_locations[0]) / "ops"
B, T, H, K, V = 1, 19, 2, 6, 4


def naive(folder):
    spec = importlib.util.spec_from_file_location("naive", OPS / folder / "naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(seed):
    rng = np.random.default_rng(seed)

    def unit():
        x = rng.normal(size=(B, T, H, K))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    kappa = unit()
    arrays = {
        "q": rng.normal(size=(B, T, H, K)), "k": unit(), "v": rng.normal(size=(B, T, H, V)),
        "beta": rng.uniform(size=(B, T, H)), "log_g": -np.exp(rng.normal(size=(B, T, H)) - 1),
        "log_w": -0.6 * rng.uniform(size=(B, T, H, K)), "a": -kappa, "b": kappa * rng.uniform(size=(B, T, H, K)),
        "state": rng.normal(size=(B, H, K, V)), "g_o": rng.normal(size=(B, T, H, V)),
    }  # fmt: skip
    return {name: torch.tensor(x, dtype=torch.float32, requires_grad=True) for name, x in arrays.items()}


def heads_first(x):
    return x.transpose(1, 2)


def record(out, name, x, o, state, used):
    """Outputs, last state, and the gradients of sum(o * g_o) + sum(state)."""
    grads = torch.autograd.grad((o * x["g_o"]).sum() + state.sum(), [x[key] for key in used])
    out[f"{name}/o"], out[f"{name}/last"] = o, state
    out |= {f"{name}/d_{key}": g for key, g in zip(used, grads, strict=True)}


def ops(out):
    x = tensors(0)
    out |= x
    # both fla recurrences that take no scale multiply q by K^-1/2
    args = [heads_first(x[key]) for key in ("q", "k", "v", "beta")]
    o, state = naive("delta_rule").delta_rule_recurrence(args[0] * K**0.5, *args[1:], initial_state=x["state"])
    record(out, "delta", x, heads_first(o), state, ("q", "k", "v", "beta", "state"))
    o, state = naive("gated_delta_rule").naive_recurrent_gated_delta_rule(
        x["q"], x["k"], x["v"], x["beta"], x["log_g"], scale=1.0, initial_state=x["state"], output_final_state=True
    )
    record(out, "gated", x, o, state, ("q", "k", "v", "beta", "log_g", "state"))
    args = [heads_first(x[key]) for key in ("q", "k", "v", "a", "b", "log_w")]
    o, state = naive("generalized_delta_rule/dplr").dplr_recurrence(
        args[0] * K**0.5, *args[1:], initial_state=x["state"]
    )
    record(out, "wkv7", x, heads_first(o), state, ("q", "k", "v", "log_w", "a", "b", "state"))


def layer(out):
    """A whole Gated DeltaNet layer of transformers, and the gradients of sum(y * g) in its input and parameters."""
    torch.manual_seed(0)
    config = OlmoHybridConfig(
        hidden_size=16, num_hidden_layers=2, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=6,
        linear_value_head_dim=12, linear_conv_kernel_dim=4, linear_allow_neg_eigval=False, num_attention_heads=2,
    )  # fmt: skip
    module = OlmoHybridGatedDeltaNet(config, 0)
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    x, g = torch.randn(2, 11, 16, requires_grad=True), torch.randn(2, 11, 16)
    y = module(x)
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad((y * g).sum(), [x, *parameters])
    out |= {"layer/x": x, "layer/g": g, "layer/y": y, "layer/d_x": grads[0]}
    out |= {f"layer/p/{name}": p for name, p in zip(names, parameters, strict=True)}
    out |= {f"layer/d/{name}": d for name, d in zip(names, grads[1:], strict=True)}


if __name__ == "__main__":
    arrays = {}
    ops(arrays)
    layer(arrays)
    np.savez_compressed(Path(__file__).parent / "delta.npz", **{k: x.detach().numpy() for k, x in arrays.items()})
