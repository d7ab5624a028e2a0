"""Makes rwkv7.npz: random weights of a tiny RWKV-7 and the logits that the `rwkv` package (0.8) gives for them.

Needs torch and rwkv; not the tests. `python tests/golden/make_rwkv7.py`. Inference only: gradients are in delta.npz.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}

import numpy as np
import torch
from rwkv.model import RWKV

D, H, L, O, F, RANK, T = 16, 2, 2, 24, 64, 4, 13


def weights():
    torch.manual_seed(0)

    def matrix(n_out, n_in):
        return torch.randn(n_out, n_in) / n_in**0.5

    def norm(name):
        return {f"{name}.weight": 1 + 0.2 * torch.randn(D), f"{name}.bias": 0.2 * torch.randn(D)}

    z = {"emb.weight": torch.randn(O, D), **norm("ln_out"), "head.weight": matrix(O, D)}
    for layer in range(L):
        at = f"blocks.{layer}."
        z |= norm(at + "ln1") | norm(at + "ln2") | norm(at + "att.ln_x")
        z |= norm(at + "ln0") if layer == 0 else {}
        z |= {f"{at}att.x_{name}": torch.rand(D) for name in "rwkvag"} | {f"{at}ffn.x_k": torch.rand(D)}
        for name in "wavg":
            z |= {f"{at}att.{name}1": torch.randn(D, RANK) / 4, f"{at}att.{name}2": torch.randn(RANK, D) / 2}
            z |= {f"{at}att.{name}0": torch.randn(D)} if name != "g" else {}
        z |= {f"{at}att.k_k": 1 + 0.3 * torch.randn(D), f"{at}att.k_a": torch.rand(D)}
        z |= {f"{at}att.r_k": 0.3 * torch.randn(H, D // H)}
        z |= {f"{at}att.{name}.weight": matrix(D, D) for name in ("receptance", "key", "value", "output")}
        z |= {f"{at}ffn.key.weight": matrix(F, D), f"{at}ffn.value.weight": matrix(D, F)}
    return z


if __name__ == "__main__":
    z = weights()
    tokens = torch.randint(0, O, (T,))
    with tempfile.TemporaryDirectory() as name:
        torch.save(z, f"{name}/model.pth")
        logits, _ = RWKV(f"{name}/model", "cpu fp32").forward(tokens.tolist(), None, full_output=True)
    arrays = {**z, "tokens": tokens, "logits": logits}
    np.savez_compressed(Path(__file__).parent / "rwkv7.npz", **{k: x.numpy() for k, x in arrays.items()})
