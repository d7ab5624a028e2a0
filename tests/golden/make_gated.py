"""Makes NAME.npz of the layers of flash-linear-attention in `LAYERS`, with gradients.

    git clone https://github.com/fla-org/flash-linear-attention FLA && git -C FLA checkout bc3b101
    pip install torch==2.13.0 numpy einops transformers==5.23.0; python tests/golden/make_gated.py FLA

fla's kernels need a GPU. In their place are its own naive forms, with what its kernels do besides written here: the
norm of q and k, KDA's decay, and the modules for convolutions and norms.
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

HERE, FLA, EPS, HEADS, DIM = Path(__file__).parent, Path(sys.argv[1]), 1e-5, 2, 8


def stub(name: str, **contents: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


def load(path: str) -> Any:
    spec: Any = importlib.util.spec_from_file_location(path.replace("/", "."), FLA / f"fla/{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ShortConvolution(nn.Conv1d):
    def __init__(self, hidden_size, kernel_size, bias, activation):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)
        assert activation == "silu"

    def forward(self, x, **unused):
        before = self.kernel_size[0] - 1
        return F.silu(super().forward(F.pad(x.transpose(1, 2), (before, 0)))).transpose(1, 2), None


class GatedNorm(nn.RMSNorm):
    def __init__(self, hidden_size, activation="silu", elementwise_affine=True, eps=EPS):
        super().__init__(hidden_size, eps=eps)
        self.activation = getattr(F, activation)

    def forward(self, x, gate):
        return super().forward(x) * self.activation(gate)


class GroupNorm(nn.Module):
    def __init__(self, num_groups, hidden_size, is_rms_norm, eps=EPS):
        super().__init__()
        assert is_rms_norm
        self.weight, self.groups, self.eps = nn.Parameter(torch.ones(hidden_size)), num_groups, eps

    def forward(self, x):
        y = x.unflatten(-1, (self.groups, -1))
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def kda(q, k, v, g, beta, A_log, dt_bias, lower_bound, **unused):
    g, rate = g + dt_bias.view(g.shape[-2:]), A_log.exp()[:, None]
    g = -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
    return load("ops/kda/naive").naive_recurrent_kda(unit(q), unit(k), v, g, torch.sigmoid(beta))


def gdn2(q, k, v, g, b, w, **unused):
    return load("ops/gdn2/naive").naive_recurrent_gdn2(unit(q), unit(k), v, g, b, w)


def gla(q, k, v, gk, **unused):
    return load("ops/gla/naive").naive_recurrent_gla(q, k, v, gk)


def forgetting(q, k, v, g, **unused):
    return load("ops/forgetting_attn/naive").naive_forgetting_attn(q, k, v, g)


def product(q, k, v, g, beta, num_householder, **unused):
    naive = load("ops/gated_delta_product/naive").naive_recurrent_gated_delta_product
    q = unit(q) * q.shape[-1] ** -0.5
    return naive(q, unit(k), v, g, beta, None, None, num_householder=num_householder)


def path(q, k, v, w, beta, g, **unused):
    naive = load("ops/path_attn/naive").naive_path_attn
    g = torch.zeros(q.shape[:3]) if g is None else g
    return naive(q, k, v, w, beta, g, q.shape[-1] ** -0.5, chunk_size=4), None


def comba(q, k, v, p, g, beta, **unused):
    """Take p = b L2(k), as in the op's docstring: the kernels normalise p = b k, which removes b."""
    p = p * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    return load("ops/comba/naive").naive_chunk_comba(unit(q), unit(k), v, p, g, beta, chunk_size=8)


def precond_gated(q, k, **others):
    naive = load("ops/precond_gated_delta_rule/naive")
    naive.F = types.SimpleNamespace(normalize=lambda x, **_: unit(x))  # with the kernels' eps
    kept = {key: x for key, x in others.items() if key not in ("use_qk_l2norm_in_kernel", "cu_seqlens")}
    return naive.naive_recurrent_precond_gated_delta_rule(q, k, **kept)


def precond_kda(q, k, v, g, g_atk, beta_atk, beta, x, eps, log_atk_scale, **unused):
    naive = load("ops/precond_kda/naive").naive_recurrent_precond_kda
    return naive(unit(q), unit(k), v, g, g_atk, beta_atk, beta, x=x, eps=eps, log_atk_scale=log_atk_scale)


def kda_gate(g, A_log, dt_bias, lower_bound):
    assert lower_bound is None
    return -A_log.exp()[:, None] * F.softplus(g + dt_bias.view(g.shape[-2:]))


stub(
    "fla.layers.utils", pad_input=None, unpad_input=None, get_layer_cache=lambda *_: None,
    update_layer_cache=lambda *_, **__: None, unpad_hidden_states=lambda x, cu, *_: (x, None, cu),
    repad_hidden_states=lambda x, *_: x, get_unpad_data=None, index_first_axis=None,
)  # fmt: skip


class Rotary:
    """Rotates the pairs (n, n + K / 2), as fla's does by default."""

    def __init__(self, dim, base):
        self.frequency = base ** (-torch.arange(0, dim, 2) / dim)

    def turned(self, x):
        angle = (torch.arange(x.shape[1])[:, None] * self.frequency)[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)

    def __call__(self, q, k, **unused):
        return self.turned(q), self.turned(k)


class Norm(nn.RMSNorm):
    def __init__(self, hidden_size, dtype, eps=EPS):
        super().__init__(hidden_size, eps=eps)


stub(
    "fla.modules",
    ShortConvolution=ShortConvolution,
    FusedRMSNormGated=GatedNorm,
    RMSNorm=Norm,
    GroupNorm=GroupNorm,
    RotaryEmbedding=Rotary,
)
stub("fla.modules.activations", ACT2FN={})
stub("fla.ops.kda", chunk_kda=kda, fused_recurrent_kda=None)
stub("fla.ops.gdn2", chunk_gdn2=gdn2, fused_recurrent_gdn2=None)
stub("fla.ops.gla", chunk_gla=None, fused_chunk_gla=None, fused_recurrent_gla=gla)  # of short sequences
stub("fla.ops.attn.decoding", attn_decoding_one_step=None)
stub("fla.ops.forgetting_attn.parallel", parallel_forgetting_attn=forgetting)
stub("fla.modules.l2norm", l2_norm=lambda x, **_: unit(x))
stub("fla.ops.path_attn.parallel", parallel_path_attn=path)
stub("fla.ops.gated_delta_product", chunk_gated_delta_product=product)
stub("fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule=None)

stub(
    "fla.ops.parallax",
    parallel_parallax=lambda q, r, k, v, **unused: load("ops/parallax/naive").naive_parallax(q, r, k, v),
)
stub("fla.ops.parallax.decode", parallax_decode=None, parallax_decode_one_step=None)
stub("fla.ops.utils.index", prepare_lens_from_mask=None)
stub("fla.ops.utils.constant", RCP_LN2=1 / np.log(2))
stub("fla.ops.utils.cumsum", chunk_global_cumsum=lambda g, cu_seqlens, scale: g.cumsum(1) * scale)
stub(
    "fla.ops.wall_attn", build_wall_kv_cache=None, parallel_wall_attn_decode=None,
    parallel_wall_attn=lambda q, k, v, g, **unused: load("ops/wall_attn/naive").naive_wall_attn(
        q, k, v, g, scale=q.shape[-1] ** -0.5
    ),
)  # fmt: skip
stub("fla.ops.comba", chunk_comba=comba, fused_recurrent_comba=None)
stub(
    "fla.ops.precond_gated_delta_rule", chunk_precond_gated_delta_rule=precond_gated,
    fused_recurrent_precond_gated_delta_rule=None, naive_recurrent_precond_gated_delta_rule=None,
)  # fmt: skip
stub("fla.ops.precond_kda", chunk_precond_kda=precond_kda, fused_recurrent_precond_kda=None)
stub("fla.ops.kda.gate", fused_kda_gate=kda_gate)

CONVOLVED = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
CONVOLVED |= {f"{name}_conv": f"{name}_conv1d" for name in "qkv"}
DELTA = {"beta": "b_proj", "norm.g": "o_norm.weight", "log_rate_H": "A_log"}
KDA = CONVOLVED | DELTA | {
    "step_bias_E": "dt_bias", "decay_in": "f_proj.0", "decay_out": "f_proj.1", "gate_in": "g_proj.0",
    "gate_out": "g_proj.1", "gate_out.b": "g_proj.1.bias",
}  # fmt: skip
PRECOND = {
    "precond.beta": "b_atk_proj", "precond.log_rate_H": "A_log_atk", "precond.step_bias_H": "dt_bias_atk",
    "precond.center_H": "log_atk_scale",
}  # fmt: skip
PATH = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "w_in": "w_proj.0", "w_out": "w_proj.1",
    "w_conv": "w_conv1d", "beta": "bt_proj", "beta.b": "bt_proj.bias",
}  # fmt: skip
SIZES: Any = {"hidden_size": DIM, "num_heads": HEADS}
DELTA_SIZES: Any = SIZES | {"head_dim": 3, "expand_v": 4 / 3, "norm_eps": EPS}
LAYERS: Any = {
    "kda": ("kda", "KimiDeltaAttention", DELTA_SIZES, KDA),
    "kda_bounded": ("kda", "KimiDeltaAttention", DELTA_SIZES | {"safe_gate": True, "lower_bound": -5.0}, KDA),
    "gdn2": ("gdn2", "GatedDeltaNet2", DELTA_SIZES, KDA | {"write": "w_proj"}),
    "gla": ("gla", "GatedLinearAttention", SIZES | {"norm_eps": EPS}, {
        "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "gate": "g_proj", "decay_in": "gk_proj.0",
        "decay_out": "gk_proj.1", "decay_out.b": "gk_proj.1.bias", "norm.g": "g_norm_swish_gate.weight",
    }),
    "fox": ("forgetting_attn", "ForgettingAttention", SIZES | {"qk_norm": True}, {
        "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "forget": "f_proj", "forget.b": "f_proj.bias",
        "q_norm.g": "q_norm.weight", "k_norm.g": "k_norm.weight",
    }),
    "path": ("path_attn", "PaTHAttention", SIZES, PATH),
    "path_fox": ("path_attn", "PaTHAttention", SIZES | {"use_forget_gate": True}, PATH | {
        "forget": "g_proj", "forget.b": "g_proj.bias",
    }),
    "gated_deltaproduct": ("gated_deltaproduct", "GatedDeltaProduct", DELTA_SIZES, CONVOLVED | DELTA | {
        "step_bias_H": "dt_bias", "decay": "a_proj", "gate": "g_proj",
    }),
    "comba": ("comba", "Comba", DELTA_SIZES, CONVOLVED | DELTA | {
        "step_bias_H": "dt_bias", "decay": "a_proj", "gate": "g_proj", "inner_decay_H": "decay", "correction_H": "D",
    }),
    "precond_gated_deltanet": ("precond_gated_deltanet", "PrecondGatedDeltaNet", DELTA_SIZES,
        CONVOLVED | DELTA | PRECOND | {
        "step_bias_H": "dt_bias", "decay": "a_proj", "gate": "g_proj", "precond.decay": "a_atk_proj",
    }),
    "parallax": ("parallax", "Parallax", SIZES | {"qk_norm": True, "num_kv_heads": 1}, {
        "q.q": "q_proj", "q.r": "r_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "q_norm.g": "q_norm.weight",
        "r_norm.g": "r_norm.weight", "k_norm.g": "k_norm.weight",
    }),
    "wall": ("wall_attn", "WallAttention", SIZES | {"qk_norm": True, "use_output_gate": True, "num_kv_heads": 1}, {
        "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "decay": "g_proj", "gate": "o_gate_proj",
        "decay_bias_E": "g_proj.bias", "q_norm.g": "q_norm.weight", "k_norm.g": "k_norm.weight",
    }),
    "precond_kda": ("precond_kda", "PrecondKDA", DELTA_SIZES, KDA | PRECOND | {"precond.decay": "a_proj"}),
}  # fmt: skip
BY_STEP = ("k_proj", "v_proj", "b_proj", "k_conv1d", "v_conv1d")  # two steps: ours has a head's side by side


def ours(name: str, theirs: str, x: torch.Tensor) -> torch.Tensor:
    """Our orientation, [in, out] of a matrix and [channels, taps] of a convolution, and our order of columns."""
    if name == "gated_deltaproduct" and theirs in BY_STEP:
        x = x.unflatten(0, (2, HEADS, -1)).transpose(0, 1).flatten(0, 2)
    return x[:, 0] if x.ndim == 3 else x.T if x.ndim == 2 else x


def arrays_of(name: str) -> dict[str, torch.Tensor]:
    """Input, output, and the gradients of sum(output * weight), with parameters in our names and orientation."""
    file, layer, settings, names = LAYERS[name]
    torch.manual_seed(0)
    module = getattr(load(f"layers/{file}"), layer)(**settings)
    for parameter in module.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    x, weight = torch.randn(2, 19, DIM, requires_grad=True), torch.randn(2, 19, DIM)
    y = module(x)[0]
    (y * weight).sum().backward()
    arrays = {"x": x, "y": y, "weight": weight, "dx": x.grad}
    parameters = dict(module.named_parameters())
    for mine, theirs in names.items():
        whole = theirs if theirs in parameters else f"{theirs}.weight"
        mine = mine if theirs in parameters else f"{mine}.w"
        parameter = parameters.pop(whole)
        arrays |= {f"p.{mine}": ours(name, theirs, parameter), f"g.{mine}": ours(name, theirs, parameter.grad)}
    assert not parameters, parameters.keys()
    return arrays


for name in LAYERS:
    kept = {key: value.detach().numpy() for key, value in arrays_of(name).items()}
    np.savez_compressed(HERE / f"{name}.npz", **kept)
