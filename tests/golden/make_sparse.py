"""Makes nsa.npz and moba.npz: the layer of flash-linear-attention and the attention of MoonshotAI/MoBA, with gradients.

    git clone https://github.com/fla-org/flash-linear-attention FLA && git -C FLA checkout bc3b101
    git clone https://github.com/MoonshotAI/MoBA MOBA && git -C MOBA checkout 61e456b
    pip install torch==2.13.0 numpy einops transformers==5.23.0; python tests/golden/make_sparse.py FLA MOBA

fla's kernels need a GPU. In their place is its own naive form, with what that takes from kernels written here: means of
blocks, windowed attention, RoPE.
"""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE, FLA, MOBA = Path(__file__).parent, Path(sys.argv[1]), Path(sys.argv[2])


def stub(name: str, **contents: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


def load(path: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block_means(x, size, cu_seqlens):
    assert cu_seqlens is None
    return torch.stack([block.mean(1) for block in x.split(size, dim=1)], dim=1)


def window_attention(q, k, v, *, causal, window_size):
    assert causal
    ago = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (ago >= 0) & (ago <= window_size[0])
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


class Rotary(torch.nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        self.frequencies = base ** (-torch.arange(0, dim, 2) / dim)

    def forward(self, *operands, **unused):
        angles = torch.arange(operands[0].shape[1])[:, None] * self.frequencies
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        turned = (torch.complex(*(half.contiguous() for half in x.chunk(2, dim=-1))) * turn for x in operands)
        return tuple(torch.cat([z.real, z.imag], dim=-1) for z in turned)


def nsa():
    """Input, output, and the gradients of sum(output * weight), with parameters in our names and orientation."""
    stub("fla.ops.utils", prepare_chunk_offsets=None)
    stub("fla.ops.utils.pooling", mean_pooling=block_means)
    naive = load(FLA / "fla/ops/nsa/naive.py")
    naive.flash_attn_func = window_attention
    stub("fla.layers.utils", pad_input=None, unpad_input=None)
    stub("fla.modules", RotaryEmbedding=Rotary)
    stub("fla.ops.nsa.parallel", parallel_nsa=naive.naive_nsa)
    stub("fla.ops.utils.index", prepare_lens_from_mask=None)
    layer = load(FLA / "fla/layers/nsa.py").NativeSparseAttention

    torch.manual_seed(0)
    # the public code wants 16 query heads or more for each key head
    module = layer(8, num_heads=32, num_kv_heads=2, head_dim=4, block_size=3, block_counts=4, window_size=5)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x, weight = torch.randn(1, 29, 8, requires_grad=True), torch.randn(1, 29, 8)
    y = module(x)[0]
    (y * weight).sum().backward()
    arrays = {"x": x, "y": y, "weight": weight, "dx": x.grad}
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gate": "g_proj", "out": "o_proj"}
    for ours, theirs in names.items():
        matrix = getattr(module, theirs).weight
        arrays |= {f"p.{ours}.w": matrix.T, f"g.{ours}.w": matrix.grad.T}
    return arrays


def moba():
    """Two sequences of 21 tokens: q, k, v, o, and the gradients of sum(o * weight)."""
    attend, length = load(MOBA / "moba/moba_naive.py").moba_attn_varlen_naive, 21
    torch.manual_seed(0)
    q, k, v, weight = (torch.randn(2 * length, 2, 6, requires_grad=True) for _ in range(4))
    ends = torch.tensor([0, length, 2 * length])
    o = attend(q, k, v, ends, length, moba_chunk_size=4, moba_topk=3)
    (o * weight).sum().backward()
    arrays = {"q": q, "k": k, "v": v, "o": o, "weight": weight, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {key: value.reshape(2, length, 2, 6) for key, value in arrays.items()}


for name, arrays in (("nsa", nsa()), ("moba", moba())):
    np.savez_compressed(HERE / f"{name}.npz", **{key: value.detach().numpy() for key, value in arrays.items()})
