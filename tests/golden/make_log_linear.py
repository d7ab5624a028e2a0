"""Makes log_linear.npz: log-linear attention by the naive form of flash-linear-attention, with gradients by autograd.

    pip install torch==2.13.0 numpy; python tests/golden/make_log_linear.py FLA

FLA is a checkout of fla-org/flash-linear-attention (bc3b101); `fla/ops/log_linear_attn/naive.py` is loaded by its path.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import torch

B, T, H, N, V, LEVELS = 2, 21, 3, 5, 4, 6
spec = importlib.util.spec_from_file_location("naive", Path(sys.argv[1]) / "fla/ops/log_linear_attn/naive.py")
naive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(naive)

rng = np.random.default_rng(0)
arrays = {
    "x": rng.normal(size=(B, T, H, V)), "log_a": -rng.uniform(0, 1, size=(B, T, H)),
    "b": rng.normal(size=(B, T, N)), "c": rng.normal(size=(B, T, N)), "m": rng.uniform(0, 2, size=(B, T, H, LEVELS)),
}  # fmt: skip
inputs = {name: torch.tensor(x, dtype=torch.float32, requires_grad=True) for name, x in arrays.items()}
c, b = (inputs[name][:, :, None].expand(B, T, H, N) for name in "cb")  # shared by the heads, as in Mamba-2
y = naive.naive_log_linear_attn(c, b, inputs["x"], inputs["log_a"], inputs["m"])
weight = torch.tensor(rng.normal(size=y.shape), dtype=torch.float32)
(y * weight).sum().backward()
out = inputs | {"y": y, "weight": weight} | {f"d{name}": x.grad for name, x in inputs.items()}
np.savez_compressed(Path(__file__).parent / "log_linear.npz", **{name: x.detach().numpy() for name, x in out.items()})
