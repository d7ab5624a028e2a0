"""Makes mlstm.npz: the layer of xLSTM 7B as transformers has it, in the recurrent form, with autograd's gradients.

    pip install torch==2.13.0 transformers==5.23.0 numpy; python tests/golden/make_xlstm.py

Gates get weights, and biases that reach both caps; transformers begins with weights of zero.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import xLSTMConfig
from transformers.models.xlstm import modeling_xlstm

torch.manual_seed(0)
config = xLSTMConfig(hidden_size=16, num_heads=2, mode="inference", autocast_kernel_dtype="float32")
layer = modeling_xlstm.xLSTMLayer(config)
state, steps = None, []
for name, p in layer.named_parameters():
    torch.nn.init.normal_(p, std=1.0 if name.endswith("norm.weight") else 0.5)
torch.nn.init.constant_(layer.igate_preact.bias, 1.0)
with torch.no_grad():
    layer.igate_preact.bias[0], layer.fgate_preact.bias[1] = -12.0, 9.0
x = torch.randn(2, 21, 16, requires_grad=True)
for t in range(x.shape[1]):  # each through the naive recurrent step
    y, state = layer(x[:, t : t + 1], state)
    steps.append(y)
y = torch.cat(steps, dim=1)
g = torch.randn_like(y)
(y * g).sum().backward()
arrays = {"x": x, "y": y, "g": g, "d_x": x.grad}
for name, p in layer.named_parameters():
    arrays |= {f"p/{name}": p, f"d/{name}": p.grad}
np.savez_compressed(
    Path(__file__).parent / "mlstm.npz", **{key: array.detach().numpy() for key, array in arrays.items()}
)
