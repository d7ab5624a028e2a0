"""Makes rwkv5.npz, rwkv6.npz (whole models of the rwkv package) and wkv6.npz, based.npz (fla's cores, with gradients).

pip install torch==2.13.0 numpy einops rwkv==0.8.32; pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0
python tests/golden/make_rwkv_based.py
fla's files are loaded by path: importing fla needs Triton. The rwkv package has no gradients; wkv6.npz has them.
"""

import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

os.environ |= {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
from rwkv.model import RWKV

HERE = Path(__file__).parent
D, L, H, N, F, VOCAB = 8, 2, 2, 4, 12, 24
RANK, DECAY_RANK = 3, 5
torch.manual_seed(0)


def save(name, **arrays):
    arrays = {k: np.asarray(v.detach().numpy() if isinstance(v, torch.Tensor) else v) for k, v in arrays.items()}
    np.savez_compressed(HERE / f"{name}.npz", **arrays)


def fla(path):
    root = Path(next(iter(importlib.util.find_spec("fla").submodule_search_locations)))
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), root / "ops" / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(*shape, scale=0.5):
    return scale * torch.randn(*shape)


def norm(theirs, ours, weights, params):
    weights[f"{theirs}.weight"] = params[f"{ours}.g"] = 1 + draw(D, scale=0.2)
    weights[f"{theirs}.bias"] = params[f"{ours}.b"] = draw(D, scale=0.2)


def layer(version, i):
    """Weights in the package's names, and the same in ours."""
    b, weights, ours = f"blocks.{i}.", {}, {}
    norm(f"{b}ln1", "norm1", weights, ours)
    norm(f"{b}ln2", "norm2", weights, ours)
    norm(f"{b}att.ln_x", "mixer.norm", weights, ours)
    att = {"receptance": "r", "key": "k", "value": "v", "gate": "g", "output": "out"}
    for theirs, name in att.items():
        ours[f"mixer.{name}.w"] = w = draw(D, D)
        weights[f"{b}att.{theirs}.weight"] = w.T.contiguous()
    for theirs, name, shape in (("key", "k", (D, F)), ("value", "v", (F, D)), ("receptance", "r", (D, D))):
        ours[f"mlp.{name}.w"] = w = draw(*shape)
        weights[f"{b}ffn.{theirs}.weight"] = w.T.contiguous()
    ours["mixer.omega"], ours["mixer.u"] = omega, u = draw(D, scale=1.0), draw(D)
    shape = (H, N) if version == 5 else (1, 1, D)
    weights[f"{b}att.time_decay"], weights[f"{b}att.time_faaaa"] = omega.reshape(shape), u.reshape(H, N)
    mu_k, mu_r = torch.rand(D), torch.rand(D)
    ours["mlp.mu_k"], ours["mlp.mu_r"] = mu_k, mu_r
    if version == 5:
        mu = torch.rand(4, D)
        ours["mixer.mu"] = mu
        for row, name in zip(mu, "rkvg"):
            weights[f"{b}att.time_mix_{name}"] = 1 - row.reshape(1, 1, D)
        weights[f"{b}ffn.time_mix_k"], weights[f"{b}ffn.time_mix_r"] = (1 - m.reshape(1, 1, D) for m in (mu_k, mu_r))
        return weights, ours
    mu, mu_x = torch.rand(5, D), torch.rand(D)
    ours["mixer.mu"], ours["mixer.mu_x"] = mu, mu_x
    for row, name in zip([mu_x, *mu], "xwkvrg"):
        weights[f"{b}att.time_maa_{name}"] = row.reshape(1, 1, D)
    weights[f"{b}ffn.time_maa_k"], weights[f"{b}ffn.time_maa_r"] = (m.reshape(1, 1, D) for m in (mu_k, mu_r))
    ours["mixer.w1.w"] = weights[f"{b}att.time_maa_w1"] = draw(D, 5 * RANK)
    ours["mixer.w2"] = weights[f"{b}att.time_maa_w2"] = draw(5, RANK, D)
    ours["mixer.d1.w"] = weights[f"{b}att.time_decay_w1"] = draw(D, DECAY_RANK)
    ours["mixer.d2.w"] = weights[f"{b}att.time_decay_w2"] = draw(DECAY_RANK, D)
    return weights, ours


def rwkv(version):
    weights, ours = {}, {}
    weights["emb.weight"] = ours["embed"] = draw(VOCAB, D)
    ours["head"] = draw(D, VOCAB)
    weights["head.weight"] = ours["head"].T.contiguous()
    norm("blocks.0.ln0", "embed_norm", weights, ours)
    norm("ln_out", "norm", weights, ours)
    layers = [layer(version, i) for i in range(L)]
    for theirs, _ in layers:
        weights |= theirs
    ours |= {f"blocks.0.{k}": torch.stack([one[k] for _, one in layers]) for k in layers[0][1]}
    ours = {k: v.clone() for k, v in ours.items()}
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/model.pth"
        torch.save(weights, path)
        model = RWKV(model=path, strategy="cpu fp32")
    tokens = torch.randint(0, VOCAB, (21,)).tolist()
    logits, _ = model.forward(tokens, None, full_output=True)
    save(f"rwkv{version}", tokens=tokens, logits=logits, **{f"p.{k}": v for k, v in ours.items()})


def with_gradients(name, f, inputs, **options):
    """Inputs as [B, H, T, .] in the names of our op; the gradients of sum(y * weight)."""
    leaves = {k: v.requires_grad_() for k, v in inputs.items()}
    y = f(*leaves.values(), **options)
    y = y[0] if isinstance(y, tuple) else y
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    save(name, y=y, weight=weight, **leaves, **{f"d{k}": v.grad for k, v in leaves.items()})


rwkv(5)
rwkv(6)
r, k, v = (torch.randn(2, 2, 21, n) for n in (4, 4, 3))
log_w = -torch.exp(torch.randn(2, 2, 21, 4))
core = fla("rwkv6/recurrent_naive").naive_recurrent_rwkv6
with_gradients("wkv6", core, {"r": r, "k": k, "v": v, "log_w": log_w, "u": torch.randn(2, 4)}, scale=1.0)
q, k, v = (torch.randn(2, 2, 21, n) for n in (4, 4, 3))
with_gradients("based", fla("based/naive").naive_parallel_based, {"q": q, "k": k, "v": v})
