"""Initial parameters of all layer types against the distributions in papers and public implementations.

Random parameters are compared with their distribution function (Kolmogorov-Smirnov), mean and deviation, so a constant,
a clipped range or another spread fails. Other parameters are compared with their formula, orthogonal matrices by their
singular values. A parameter without a rule fails.
"""

import importlib
import math
import re

import jax
import numpy as np
import pytest

from seqjax.config import from_config_dict
from seqjax.models import Model
from seqjax.nn import params as params_lib

D, L, F, O = 64, 4, 96, 256  # width, layers, MLP width, vocabulary
E = 2 * D
DEPTH = np.arange(L)[:, None]
RHO, KAPPA, CHANNEL = DEPTH / (L - 1), 1 - DEPTH / L, np.arange(D) / D
LINE = np.arange(D) / (D - 1)  # 0 to 1 over the channels


def normal_cdf(x):
    return 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def distance(values, cdf) -> float:
    """Return the Kolmogorov-Smirnov distance times sqrt(n), which exceeds 1.95 with probability 0.001."""
    x = np.sort(values.ravel())
    rank = np.arange(len(x) + 1) / len(x)
    return math.sqrt(len(x)) * max(np.abs(cdf(x) - rank[1:]).max(), np.abs(cdf(x) - rank[:-1]).max())


def normal(std):
    def check(x):
        assert abs(x.mean()) < 5 * std / math.sqrt(x.size)
        assert x.std() == pytest.approx(std, rel=4 / math.sqrt(x.size))
        assert distance(x / std, normal_cdf) < 1.95

    return check


def uniform(low, high, of=lambda x: x):
    """Return a check that `of(parameter)` is uniform in [low, high]."""

    def check(x):
        y = (of(x) - low) / (high - low)
        assert y.min() > -1e-4
        assert y.max() < 1 + 1e-4
        if y.size > 8:
            assert y.min() < 8 / y.size, "values do not reach the lower end"
            assert y.max() > 1 - 8 / y.size, "values do not reach the upper end"
        assert distance(y, lambda y: np.clip(y, 0, 1)) < 1.95

    return check


def around(bound):
    return uniform(-bound, bound)


def exactly(value):
    def check(x):
        np.testing.assert_allclose(x, np.broadcast_to(value, x.shape), rtol=1e-5, atol=1e-6)

    return check


def orthogonal(scale=1.0):
    """Return a check for random orthogonal rows or columns, scaled by sqrt(out / in) if the matrix widens."""

    def check(x):
        for w in x if x.ndim == 3 else x[None]:
            gain = scale * max(1.0, math.sqrt(w.shape[1] / w.shape[0]))
            np.testing.assert_allclose(np.linalg.svd(w, compute_uv=False), gain, rtol=1e-4)
            assert abs(w.mean()) < 5 * w.std() / math.sqrt(w.size)
            assert np.abs(w - np.diag(np.diag(w)) if w.shape[0] == w.shape[1] else w).max() > 0
        assert x.ndim < 3 or not np.allclose(x[0], x[1])

    return check


def softplus(x):
    return np.logaddexp(0, x)


GPT, RESIDUAL = normal(0.02), normal(0.02 / math.sqrt(2 * L))
STEP = uniform(math.log(1e-3), math.log(0.1), lambda x: np.log(softplus(x)))
NORMS = {
    r"(mixer\.)?(norm|norm1|norm2|embed_norm|q_norm|k_norm)\.g": exactly(1.0),
    r"(norm|norm1|norm2|embed_norm)\.b": exactly(0.0),
}
OUTSIDE = {r"embed": GPT, r"positions": GPT, r"head": GPT}
MLP = {r"mlp\.(gate|up)\.w": GPT, r"mlp\.down\.w": RESIDUAL, r"(mlp|mixer)\.\w+\.b": exactly(0.0)}
PRECOND = {
    r"mixer\.(precond\.)?\w+\.w|mlp\.down\.w": GPT, r"mixer\.precond\.step_bias_H": STEP,
    r"mixer\.precond\.center_H": exactly(-0.2),
}  # fmt: skip
ATTENTION = {
    r"mixer\.[qkv]\.w": GPT, r"mixer\.[qk]\.table": normal(0.02 * math.sqrt(D)), r"mixer\.out\.w": RESIDUAL,
    r"mixer\.conv\.[qkv]\.w": around(0.5),
}  # fmt: skip
GPT_LIKE = NORMS | OUTSIDE | MLP | ATTENTION
SSM = NORMS | OUTSIDE | {
    r"mixer\.([xz]|bc|dt)\.w": around(D**-0.5), r"mixer\.conv(_\w+)?\.[wb]": around(0.5), r"mixer\.dt_bias": STEP,
    r"mixer\.skip": exactly(1.0), r"mixer\.out\.w": around((E * L) ** -0.5), r"mixer\.decay\.alpha": exactly(0.0),
}  # fmt: skip


def mix(power):
    """Return a check for the previous token's weight, 1 - c^power."""
    return exactly(1 - CHANNEL**power)


SLOW, FAST = CHANNEL**KAPPA, CHANNEL ** (KAPPA / 2)
HEAD_NORM = {r"mixer\.norm\.g": exactly(((1 + DEPTH) / L) ** 0.7), r"mixer\.norm\.b": exactly(0.0)}
RWKV = NORMS | OUTSIDE | HEAD_NORM | {
    r"mixer\.out\.w": exactly(0.0), r"mlp\.v\.w": exactly(0.0), r"mlp\.r\.w": exactly(0.0), r"mlp\.k\.w": orthogonal(),
    r"mixer\.[rv]\.w": orthogonal(),
}  # fmt: skip
RWKV_56 = RWKV | {
    r"mixer\.[kg]\.w": orthogonal(0.1),
    r"mixer\.omega": exactly(-6 + 5 * LINE ** (0.7 + 1.3 * RHO)),
    r"mixer\.u": exactly(RHO * (1 - LINE) + 0.1 * ((np.arange(D) + 1) % 3 - 1)),
}
HEAD = D // 4
POSITION = ((np.arange(D) % HEAD) - (HEAD - 1) / 2) / ((HEAD - 1) / 2)
ZIGZAG, CENTRED = POSITION * np.abs(POSITION), LINE - 0.5
LORAS = {
    r"mixer\.\w_lora\.a": exactly(0.0),
    r"mixer\.\w_lora\.b": orthogonal(0.1),
    r"mixer\.v_lora\.bias": exactly(0.73 - 0.4 * CENTRED),
    r"mixer\.mu\.[rg]": mix(0.2 * KAPPA),
    r"mixer\.mu\.[wa]": mix(0.9 * KAPPA),
    r"mixer\.mu\.[kv]": mix(0.7 * KAPPA),
    r"mlp\.mu_k": mix(KAPPA**4),
}
# Config text -> rules, with the source of the published values. The last matching rule applies.
CASES = {
    # Radford et al., 2019: GPT-2
    "transformer:": GPT_LIKE,
    "transformer_pp:model.tie_embeddings=False,model.mixer.const=qk,model.mixer.qk_norm=True": GPT_LIKE,
    "transformer_pp:model.mixer.conv=True,model.mixer.kv_heads=1": GPT_LIKE,
    # arXiv 2505.18522, section 5: as Transformer++, with gains of the QK norm
    "top1_chunk:model.mixer.conv=True": GPT_LIKE,
    "top1_element:model.mixer.gate=True": GPT_LIKE | {r"mixer\.gate\.w": GPT},
    # HazyResearch/based; PyTorch's Conv1d for the taps
    "based:model.n_layers=5": GPT_LIKE | {
        r"mlp\.down\.w|mixer\.out\.w": normal(0.02 / math.sqrt(10)), r"mixer\.(enter|gate)\.w": GPT,
        r"mixer\.conv\.w": around(3**-0.5),
    },
    # state-spaces/mamba, modules/mamba_simple.py and models/mixer_seq_simple.py
    "mamba1:model.mixer.dt_rank=8": SSM | {
        r"mixer\.(delta|bc)\.w": around(E**-0.5), r"mixer\.dt\.w": around(8**-0.5),
        r"mixer\.a_log": exactly(np.log(np.arange(1, 17))),
    },
    # state-spaces/mamba, modules/mamba2.py
    "mamba2:model.mixer.head_dim=2": SSM | {r"mixer\.a_log": uniform(1, 16, np.exp)},
    "mamba2:model.mixer.decay=one,model.mixer.norm=False": SSM | {
        r"mixer\.decay\.w": around(D**-0.5), r"mixer\.decay\.b": STEP,
    },
    # as Mamba-2; arXiv 2506.04761 for the levels
    "log_linear_mamba2:model.mixer.head_dim=2": SSM | {
        r"mixer\.a_log": uniform(1, 16, np.exp), r"mixer\.level\.w": around(D**-0.5),
        r"mixer\.level_scale": exactly(1.0),
    },
    # state-spaces/mamba, modules/mamba3.py
    "mamba3:model.mixer.head_dim=1,model.mixer.norm=True": SSM | MLP | {
        r"mixer\.(rate|trap|angle)\.w": around(D**-0.5), r"mixer\.[bc]_(norm\.g|bias)": exactly(1.0),
        r"mixer\.out\.w": around((E * 2 * L) ** -0.5),
    },
    # flash-linear-attention, layers/gated_deltanet.py, and its models, which draw every matrix from N(0, 0.02^2)
    "gated_deltanet:model.mixer.heads=48": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT, r"mixer\.log_rate_H": uniform(0, 16, np.exp), r"mixer\.step_bias_H": STEP,
    },
    "deltanet:": NORMS | OUTSIDE | MLP | {r"mixer\.\w+\.w|mlp\.down\.w": GPT},
    # flash-linear-attention, layers/gated_deltaproduct.py
    "gated_deltaproduct:model.mixer.heads=32,model.mixer.value_dim=64": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT, r"mixer\.log_rate_H": uniform(0, 16, np.exp), r"mixer\.step_bias_H": STEP,
    },
    # flash-linear-attention, layers/gla.py
    "gla:": NORMS | OUTSIDE | MLP | {r"mixer\.\w+\.w|mlp\.down\.w": GPT},
    # arXiv 2503.13427, xlstm_large
    "mlstm:": NORMS | OUTSIDE | MLP | {
        r"mixer\.[qkv]\.w|mixer\.gate\.w": normal((2 / (5 * D)) ** 0.5), r"mixer\.out\.w": normal(2 / (L * D**0.5)),
        r"mixer\.(input|forget)\.w": exactly(0.0), r"mixer\.input_bias_H": exactly(-10.0),
        r"mixer\.forget_bias_H": exactly(np.linspace(3, 6, 4)), r"mixer\.gain_E": exactly(1.0),
    },
    # flash-linear-attention, layers/kda.py
    "kda:model.mixer.heads=32": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT, r"mixer\.log_rate_H": uniform(1, 16, np.exp), r"mixer\.step_bias_E": STEP,
    },
    "kda:model.mixer.lower_bound=-5.0": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT, r"mixer\.log_rate_H": exactly(0.0), r"mixer\.step_bias_E": STEP,
    },
    # flash-linear-attention, layers/comba.py, layers/precond_gated_deltanet.py and layers/precond_kda.py
    "comba:model.mixer.heads=48": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT, r"mixer\.log_rate_H": uniform(0, 16, np.exp), r"mixer\.step_bias_H": STEP,
        r"mixer\.(inner_decay|correction)_H": exactly(1.0),
    },
    "precond_gated_deltanet:model.mixer.heads=48": NORMS | OUTSIDE | MLP | PRECOND | {
        r"mixer\.(precond\.)?log_rate_H": uniform(0, 16, np.exp), r"mixer\.step_bias_H": STEP,
    },
    "precond_kda:model.mixer.heads=32": NORMS | OUTSIDE | MLP | PRECOND | {
        r"mixer\.(precond\.)?log_rate_H": uniform(1, 16, np.exp), r"mixer\.step_bias_E": STEP,
    },
    # flash-linear-attention, layers/forgetting_attn.py
    "fox:model.mixer.kv_shift=True,model.mixer.qk_norm=True,model.mixer.output_gate=True": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT,
    },
    # flash-linear-attention, layers/mesa_net.py
    "mesa_net:model.mixer.gate=True": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT, r"mixer\.ridge_E": exactly(math.log(math.exp(0.75) - 1)),
    },
    # test-time-training/ttt-lm-pytorch, ttt.py
    "ttt_linear:": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mixer\.w_HKK|mlp\.down\.w": GPT, r"mixer\.[qk]_conv\.[wb]": around(4**-0.5),
        r"mixer\.(token_M|b_E)": exactly(0.0), r"mixer\.inner_norm\.g": exactly(1.0),
    },
    # flash-linear-attention, layers/parallax.py
    "parallax:model.mixer.qk_norm=True,model.mixer.gate=True": NORMS | OUTSIDE | MLP | {
        r"mixer\.(q\.)?\w+\.w|mlp\.down\.w": GPT, r"mixer\.r_norm\.g": exactly(1.0),
    },
    # flash-linear-attention, layers/wall_attn.py
    "wall:model.mixer.qk_norm=True,model.mixer.gate=True": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT, r"mixer\.decay_bias_E": exactly(8.0),
    },
    # flash-linear-attention, layers/path_attn.py
    "path:model.mixer.forget_gate=True": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT, r"mixer\.w_conv\.w": around(3**-0.5),
    },
    # transformers, models/kimi_linear and models/olmo_hybrid
    "mla:model.mixer.q_rank=16,model.mixer.gate=True": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT, r"mixer\.kv_norm\.g": exactly(1.0),
    },
    "olmo_hybrid:model.mixer={'name':'post_norm_attention'}": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mlp\.down\.w": GPT,
    },
    # flash-linear-attention, layers/nsa.py
    "nsa:": NORMS | OUTSIDE | MLP | {r"mixer\.\w+\.w|mlp\.down\.w": GPT},
    # transformers, models/minimax_m3_vl; its gains 1 + w start at 1
    "msa:": NORMS | OUTSIDE | MLP | {
        r"mixer\.\w+\.w|mixer\.index\.[qk]\.w|mlp\.down\.w": GPT, r"mixer\.index\.[qk]_norm\.g": exactly(1.0),
    },
    "dsa:": GPT_LIKE | {
        r"mixer\.index\.[qkw]\.w": GPT, r"mixer\.index\.k_norm\.g": exactly(1.0),
        r"mixer\.index\.k_norm\.b": exactly(0.0),
    },
    # BlinkDL/RWKV-LM, RWKV-v5/src/model.py (x052)
    "rwkv5:model.mixer.head_dim=16": RWKV_56 | {
        r"mixer\.mu": exactly(1 - np.stack([FAST, SLOW, SLOW + 0.3 * RHO, FAST], axis=1)), r"mlp\.mu_[kr]": mix(KAPPA),
    },
    # BlinkDL/RWKV-LM, RWKV-v5/src/model.py (x060)
    "rwkv6:model.mixer.head_dim=16,model.tie_embeddings=False": RWKV_56 | {
        r"mixer\.mu": exactly(1 - np.stack([SLOW, SLOW, SLOW + 0.3 * RHO, FAST, FAST], axis=1)),
        r"mixer\.mu_x": exactly(1 - SLOW), r"mixer\.(w1|d1)\.w": exactly(0.0), r"mixer\.(w2|d2\.w)": around(0.01),
        r"mlp\.mu_[kr]": mix(KAPPA**3), r"embed": around(1e-4), r"head": orthogonal(0.5),
    },
    # BlinkDL/RWKV-LM, RWKV-v7/train_temp/src/model.py (x070)
    "rwkv7:model.mixer.heads=4": RWKV | LORAS | {
        r"mixer\.k\.w": orthogonal(0.1), r"mixer\.k_k": exactly(0.71 - 0.1 * CENTRED), r"mixer\.k_a": exactly(1.02),
        r"mixer\.r_k": exactly(-0.04), r"mixer\.a_lora\.bias": exactly(-0.19 + 0.3 * ZIGZAG + 0.4 * CENTRED),
        r"mixer\.w_lora\.bias": exactly(-6 + 6 * LINE ** (1 + RHO**0.3) + 0.5 + 2.5 * ZIGZAG),
    },
    # as RWKV-7, without its core (arXiv 2505.18522, section 6)
    "rwkv7_shell:model.mixer.heads=4,model.mixer.key_init=0.7": RWKV | LORAS | {
        r"mixer\.core\.[qv]\.w": orthogonal(), r"mixer\.core\.k\.w": orthogonal(0.7),
        r"mixer\.core\.out\.w": exactly(0.0), r"mixer\.core\.[qk]_norm\.g": exactly(1.0),
    },
}  # fmt: skip


def initial_params(text: str):
    name, _, settings = text.partition(":")
    sizes = {"model.dim": D, "model.n_layers": L, "model.mlp.dim": F, "model.vocab_size": O}
    overrides = [part for part in settings.split(",") if part]
    sizes = [
        f"{key}={value}" for key, value in sizes.items() if not any(part.startswith(f"{key}=") for part in overrides)
    ]
    config = importlib.import_module(f"configs.{name}").get_config(",".join(["debug", *sizes, *overrides]))
    # Without jit, all cases share the programs of single operations.
    return params_lib.names(Model(from_config_dict(config).model, max_len=32).init(jax.random.key(0)))


@pytest.mark.parametrize("text", CASES)
def test_initial_parameters_equal_published(text):
    for path, x in initial_params(text):
        name = re.sub(r"^blocks\.\d\.", "", path)
        checks = [check for rule, check in CASES[text].items() if re.fullmatch(rule, name)]
        assert checks, f"{path}: no rule"
        try:
            checks[-1](np.asarray(x, np.float64))
        except AssertionError as error:
            raise AssertionError(f"{path}: {error}") from error


def test_hybrid_initialization_uses_the_layer_index():
    """Two mixers alternate over four layers: the first has layers 0 and 2, the second 1 and 3."""
    mixer = "{'name':'%s','head_dim':16}"
    text = f"rwkv5:model.mixer=({mixer % 'rwkv5'},{mixer % 'rwkv6'})"
    settings = text.partition(":")[2]
    config = importlib.import_module("configs.rwkv5").get_config(f"debug,model.dim={D},model.n_layers={L},{settings}")
    model = Model(from_config_dict(config).model, max_len=32)
    # A norm's initial gain depends on the layer index; nothing else is computed.
    gains = jax.jit(lambda key: [model.init(key)["blocks"][i]["mixer"]["norm"]["g"] for i in "01"])(jax.random.key(0))
    for first, got in enumerate(gains):
        want = ((1 + np.array([first, first + 2])) / L) ** 0.7
        np.testing.assert_allclose(got, np.broadcast_to(want[:, None], (2, D)), rtol=1e-6)
