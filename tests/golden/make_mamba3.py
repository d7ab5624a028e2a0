"""Makes mamba3.npz and mamba3_norm.npz: the layer of state-spaces/mamba around its naive recurrence, with gradients.

    git clone https://github.com/state-spaces/mamba MAMBA && git -C MAMBA checkout e9594ce
    pip install torch==2.13.0 numpy einops pytest triton; python tests/golden/make_mamba3.py MAMBA

Its kernels need a GPU. In their place are the functions that its own tests compare them with, so nothing else of the
package is imported: `mamba3_siso_step_ref` for the recurrence, `rms_norm_ref` for the norms.
"""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE, MAMBA = Path(__file__).parent, Path(sys.argv[1])
KERNELS = "mamba_ssm.ops.triton.mamba3."


def stub(name: str, **contents: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


def load(path: str) -> Any:
    spec: Any = importlib.util.spec_from_file_location(Path(path).stem, MAMBA / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rms_norm_ref = load("mamba_ssm/ops/triton/layernorm_gated.py").rms_norm_ref


class RMSNorm(torch.nn.Module):
    """With the parameters of the public one."""

    def __init__(self, size, *, eps, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.options = {"eps": eps, "group_size": group_size, "norm_before_gate": norm_before_gate}

    def forward(self, x, z=None):
        return rms_norm_ref(x, self.weight, None, z, **self.options)


def recurrence(*, chunk_size, return_final_states, cu_seqlens, **operands):
    assert not return_final_states
    assert cu_seqlens is None
    return naive(**operands)[0]


def ours(p, width, state, heads):
    names = {"z": width, "x": width, "bc": 2 * state, "dt": heads, "rate": heads, "trap": heads}
    matrices = p["in_proj.weight"].T
    parts = matrices.split([*names.values(), matrices.shape[1] - sum(names.values())], dim=1)
    named = {f"{name}.w": part for name, part in zip([*names, "angle"], parts, strict=True)}
    named |= {"b_norm.g": p["B_norm.weight"], "c_norm.g": p["C_norm.weight"], "skip": p["D"], "dt_bias": p["dt_bias"]}
    named |= {"b_bias": p["B_bias"][:, 0], "c_bias": p["C_bias"][:, 0], "out.w": p["out_proj.weight"].T}
    return named | ({"norm.g": p["norm.weight"]} if "norm.weight" in p else {})


def layer(name, **settings):
    """Input, output, and the gradients of sum(output * weight), in our names and orientation."""
    torch.manual_seed(0)
    mixer = Mamba3(8, d_state=8, headdim=4, **settings)
    for key, p in mixer.named_parameters():
        with torch.no_grad():
            p.copy_(torch.randn_like(p) * (0.5 if p.ndim > 1 else 0.3) + (1.0 if "norm" in key or key == "D" else 0.0))
    x, weight = torch.randn(2, 19, 8, requires_grad=True), torch.randn(2, 19, 8)
    y = mixer(x)
    (y * weight).sum().backward()
    arrays = {"x": x, "y": y, "weight": weight, "dx": x.grad}
    for prefix, values in (("p", mixer.named_parameters()), ("g", [(k, p.grad) for k, p in mixer.named_parameters()])):
        arrays |= {f"{prefix}.{k}": v for k, v in ours(dict(values), 16, 8, 4).items()}
    np.savez_compressed(HERE / f"{name}.npz", **{k: v.detach().numpy() for k, v in arrays.items()})


for module in ("siso_combined", "siso_step"):
    stub(f"{KERNELS}mamba3_{module}", **{f"mamba3_{module}": None})
naive = load("tests/ops/triton/test_mamba3_siso.py").mamba3_siso_step_ref
stub(f"{KERNELS}mamba3_siso_combined", mamba3_siso_combined=recurrence)
stub(f"{KERNELS}mamba3_mimo_rotary_step", apply_rotary_qk_inference_fwd=None)
stub("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=RMSNorm)
Mamba3 = load("mamba_ssm/modules/mamba3.py").Mamba3
layer("mamba3")
layer("mamba3_norm", is_outproj_norm=True, rope_fraction=1.0)
