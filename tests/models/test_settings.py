"""No model setting is ignored: changing each setting on its own must change its effect in the table below.

The effects: the `shapes` of the parameters, how they `start`, the loss's `forward` program, or only its `backward`
program; a `refused` value must raise an error. Programs are compared as StableHLO with constants, so nothing is
compiled. test_against_numpy.py checks that the changed program is right; settings that only affect speed have tests of
equal results.
"""

import functools
import importlib
import types

import jax
import jax.numpy as jnp
import pytest

from seqjax import mixers
from seqjax.config import from_config_dict, to_dict
from seqjax.models import Model
from tests import support

BATCH, LENGTH = 2, 13
# setting: (changed value, effect, further settings of both models)
MODEL = {
    "vocab_size": (40, "shapes"),
    "dim": (32, "shapes"),
    "n_layers": (3, "shapes"),
    "mlp.kind": ("swiglu", "forward"),
    "mlp.dim": (20, "shapes"),
    "mlp.bias": (True, "shapes"),
    "mlp.approximate_gelu": (True, "forward"),
    "mlp.rescale_init": (False, "start"),
    "canon": ("C", "shapes"),
    "token_shift": (True, "shapes"),
    "attn_residual": (2, "shapes"),
    "norm": ("layernorm", "shapes"),
    "norm_eps": (0.3, "forward"),
    "init": ("rwkv", "start", "model.tie_embeddings=False"),
    "embed_norm": (True, "shapes"),
    "learned_positions": (True, "shapes"),
    "tie_embeddings": (False, "shapes"),
    "dtype": ("bfloat16", "forward"),
    "residual_dtype": ("float32", "forward", "model.dtype=bfloat16"),
    "remat": ("full", "backward"),
    "scan_layers": (False, "forward"),
    "loss_chunk": (5, "forward"),
    "loss_implementation": ("nowhere", "refused"),
}
ATTENTION = {
    "heads": (2, "forward"),
    "kv_heads": (2, "shapes"),
    "head_dim": (6, "shapes"),
    "position": ("none", "forward"),
    "rope_base": (37.0, "forward"),
    "rope_share": (0.5, "forward"),
    "qk_norm": (True, "shapes"),
    "bias": (True, "shapes"),
    "conv": (True, "shapes"),
    "gate": (True, "shapes"),
}
# With the default values, llama3 scaling changes no frequency of such a small head.
LLAMA3 = "model.mixer.rope_scaling=llama3,model.mixer.rope_original_len=1256"
ROPE = {
    "rope_scaling": ("linear", "forward"),
    "rope_factor": (2.0, "forward", "model.mixer.rope_scaling=linear"),
    "rope_low_freq_factor": (0.5, "forward", LLAMA3),
    "rope_high_freq_factor": (3.0, "forward", LLAMA3),
    "rope_original_len": (64, "forward", "model.mixer.rope_scaling=llama3"),
}
SOFTMAX = (
    ATTENTION
    | ROPE
    | {
        "qk_norm_eps": (0.3, "forward", "model.mixer.qk_norm=True"),
        "qkv_bias": (True, "shapes"),
        "rescale_init": (False, "start"),
        "window": (3, "forward"),
        "const": ("qk", "shapes"),
        "temperature": (0.4, "forward"),
        "implementation": ("cudnn", "refused"),
    }
)
TOP1 = ATTENTION | {"heads": (2, "shapes"), "qk_norm": (False, "shapes"), "implementation": ("nowhere", "refused")}
DELTA = {
    "heads": (2, "shapes"),
    "key_dim": (8, "shapes"),
    "value_dim": (32, "shapes"),
    "conv_width": (2, "shapes"),
    "conv": (False, "shapes"),
    "norm_eps": (0.3, "forward"),
    "chunk_size": (5, "forward"),
    "implementation": ("nowhere", "refused"),
}
SSM = {
    "expand": (1, "shapes"),
    "state": (5, "shapes"),
    "conv_width": (2, "shapes"),
    "conv": (False, "shapes"),
    "decay": ("one", "shapes"),
    "chunk_size": (5, "forward"),
}
RWKV = {"head_dim": (8, "forward"), "chunk_size": (5, "forward"), "implementation": ("nowhere", "refused")}
MIXERS = {
    "transformer": SOFTMAX | {
        "position": ("rope", "forward"), "rope_base": (37.0, "forward", "model.mixer.position=rope"),
        "rope_share": (0.5, "forward", "model.mixer.position=rope"),
        "bias": (False, "shapes"), "qkv_bias": (False, "shapes"),
    } | {key: (value, kind, "model.mixer.position=rope", *also) for key, (value, kind, *also) in ROPE.items()},
    "transformer_pp": SOFTMAX,
    "top1_chunk": TOP1 | {
        "chunk_size": (3, "forward"), "selection": ("approx", "forward"), "top_k": (2, "forward"),
        "shortlist": (2, "forward", "model.mixer.selection=shortlist"),
        "table": ("mean_eigen", "forward", "model.mixer.selection=shortlist,model.mixer.shortlist=1"),
    },
    "top1_element": TOP1 | {"v_grad": ("soft", "backward")},
    "fox": {
        "heads": (2, "shapes"), "kv_heads": (2, "shapes"), "head_dim": (6, "shapes"), "window": (3, "forward"),
        "conv": (True, "shapes"), "kv_shift": (True, "shapes"), "qk_norm": (True, "shapes"),
        "output_gate": (True, "shapes"), "norm_eps": (0.3, "forward", "model.mixer.qk_norm=True"),
        "implementation": ("chunked", "forward"),
    },
    "path": {
        "heads": (2, "shapes"), "kv_heads": (2, "shapes"), "head_dim": (6, "shapes"), "path_rank": (2, "shapes"),
        "conv_width": (2, "shapes"), "forget_gate": (True, "shapes"), "qk_norm": (True, "shapes"),
        "norm_eps": (0.3, "forward", "model.mixer.qk_norm=True"), "chunk_size": (5, "forward"),
        "implementation": ("nowhere", "refused"),
    },
    "nsa": {key: ATTENTION[key] for key in ATTENTION if key not in ("bias", "gate")} | {
        "heads": (2, "shapes"), "block_size": (5, "forward"), "blocks": (3, "forward"), "window": (3, "forward"),
    },
    "msa": {key: ATTENTION[key] for key in ATTENTION if key != "bias"} | {
        "heads": (2, "shapes"), "qk_norm": (False, "shapes"), "norm_eps": (0.3, "forward"),
        "block_size": (3, "forward"), "blocks": (3, "forward"), "index_dim": (6, "shapes"),
        "index_rope": (4, "forward"), "implementation": ("nowhere", "refused"),
    },
    "dsa": {key: ATTENTION[key] for key in ATTENTION if key != "bias"} | {
        "top_k": (4, "forward"), "index_heads": (3, "shapes"), "index_dim": (16, "shapes"),
        "index_rope": (8, "forward"),
    },
    "mamba1": SSM | {"dt_rank": (2, "shapes")},
    "mamba2": SSM | {"head_dim": (8, "shapes"), "norm": (False, "shapes"), "gate": (False, "shapes")},
    "log_linear_mamba2": {
        "expand": (1, "shapes"), "state": (5, "shapes"), "head_dim": (8, "shapes"), "conv_width": (2, "shapes"),
        "levels": (3, "shapes"), "chunk_size": (2, "forward"),
    },
    "mamba3": {
        "expand": (1, "shapes"), "state": (5, "shapes"), "head_dim": (8, "shapes"), "norm": (True, "shapes"),
        "chunk_size": (5, "forward"), "rate": ("softplus", "forward"),
        "angles": (2, "shapes", "model.mixer.state=5"),
    },
    "deltanet": DELTA,
    "gated_deltanet": DELTA | {
        "heads": (3, "shapes"), "value_dim": (12, "shapes"), "value_heads": (8, "shapes"), "gate": (False, "shapes"),
    },
    "gated_deltaproduct": DELTA | {
        "key_dim": (16, "shapes"), "steps": (3, "shapes"), "decay": (False, "shapes"),
        "allow_negative_eigenvalues": (False, "forward"), "gate": (False, "shapes"),
    },
    "gla": {
        "heads": (2, "shapes"), "key_dim": (4, "shapes"), "value_dim": (32, "shapes"), "decay_rank": (2, "shapes"),
        "norm_eps": (0.3, "forward"), "chunk_size": (5, "forward"), "implementation": ("nowhere", "refused"),
        "gate": (False, "shapes"),
    },
    "mlstm": {
        "heads": (2, "shapes"), "key_dim": (4, "shapes"), "value_dim": (32, "shapes"), "gate_cap": (2.0, "forward"),
        "norm_eps": (0.3, "forward"), "chunk_size": (5, "forward"), "implementation": ("nowhere", "refused"),
        "gate": (False, "shapes"),
    },
    "kda": DELTA | {
        "lower_bound": (-5.0, "forward"), "channel_gates": (True, "shapes"), "gate": (False, "shapes"),
        "gate_rank": ("full", "shapes"),
    },
    "mla": {
        "heads": (2, "shapes"), "head_dim": (8, "shapes"), "shared_dim": (4, "shapes"), "value_head_dim": (6, "shapes"),
        "kv_rank": (4, "shapes"), "q_rank": (4, "shapes"), "position": ("none", "forward"),
        "rope_base": (37.0, "forward", "model.mixer.shared_dim=4"), "gate": (True, "shapes"),
        "norm_eps": (0.3, "forward"), "implementation": ("cudnn", "refused"),
    },
    "post_norm_attention": {
        "heads": (2, "forward"), "kv_heads": (2, "shapes"), "head_dim": (6, "shapes"), "position": ("rope", "forward"),
        "rope_base": (37.0, "forward", "model.mixer.position=rope"), "qk_norm": (True, "shapes"),
        "rope_share": (0.5, "forward", "model.mixer.position=rope"), "qk_norm_eps": (0.3, "forward"),
        "gate": (True, "shapes"), "window": (3, "forward"), "implementation": ("cudnn", "refused"),
    },
    "comba": DELTA | {
        "heads": (3, "shapes"), "value_dim": (12, "shapes"), "gate": (False, "shapes"),
        "inner_decay": (False, "shapes"), "correction": (0.02, "start"),
    },
    "precond_gated_deltanet": DELTA | {
        "heads": (3, "shapes"), "value_dim": (12, "shapes"), "gate": (False, "shapes"),
        "precond_bound": (1.2, "forward"),
    },
    "precond_kda": DELTA | {
        "lower_bound": (-5.0, "forward"), "gate": (False, "shapes"), "precond_bound": (1.2, "forward"),
    },
    "mesa_net": {
        "heads": (2, "shapes"), "key_dim": (8, "shapes"), "value_dim": (32, "shapes"), "conv_width": (2, "shapes"),
        "conv": (False, "shapes"), "norm_eps": (0.3, "forward"), "chunk_size": (5, "forward"), "steps": (3, "forward"),
        "min_ridge": (0.5, "forward"), "gate": (True, "shapes"),
    },
    "ttt_linear": {
        "heads": (2, "shapes"), "mini_batch": (5, "shapes"), "base_lr": (0.5, "forward"), "conv": (False, "shapes"),
        "conv_width": (2, "shapes"), "gate": (False, "shapes"), "norm_eps": (0.3, "forward"),
    },
    "parallax": {
        "heads": (2, "forward"), "kv_heads": (2, "shapes"), "head_dim": (6, "shapes"), "position": ("none", "forward"),
        "rope_base": (37.0, "forward"), "qk_norm": (True, "shapes"), "gate": (True, "shapes"),
    },
    "wall": {
        "heads": (2, "forward"), "kv_heads": (2, "shapes"), "head_dim": (6, "shapes"), "qk_norm": (True, "shapes"),
        "gate": (True, "shapes"),
    },
    "rwkv5": RWKV,
    "rwkv6": RWKV | {"shift_rank": (2, "shapes"), "decay_rank": (2, "shapes")},
    "rwkv7": {"heads": (2, "forward"), "chunk_size": (5, "forward"), "implementation": ("nowhere", "refused")}
    | {f"{name}_rank": (2, "shapes") for name in ("decay", "eta", "value", "gate")},
    "rwkv7_shell": {
        "heads": (2, "shapes"), "core": ("top1_approx", "forward"), "window": (3, "forward", "model.mixer.core=window"),
        "chunk_size": (3, "forward"), "position": ("none", "forward"), "rope_base": (37.0, "forward"),
        "value_rank": (2, "shapes"), "gate_rank": (2, "shapes"), "key_init": (0.1, "start"),
        "token_shift": (False, "shapes"), "value_residual": (False, "shapes"), "gate": (False, "shapes"),
        "head_norm": (False, "shapes"), "qk_norm": (False, "shapes"),
        "implementation": ("nowhere", "refused"),
    },
    "based_conv": {"expand": (1, "shapes"), "conv_width": (2, "shapes")},
    "based_linear": {"heads": (2, "shapes"), "feature_dim": (3, "shapes"), "chunk_size": (5, "forward")},
}  # fmt: skip
# Mixers that occur only in hybrids: the config file, and the override that uses them in all layers.
IN_HYBRID = {
    "based_linear": ("based", "model.mixer={'name':'based_linear','feature_dim':2}"),
    "based_conv": ("based", "model.mixer={'name':'based_conv'}"),
    "post_norm_attention": ("olmo_hybrid", "model.mixer={'name':'post_norm_attention','heads':4}"),
    # Not a hybrid, but its default does not fit the length.
    "dsa": ("dsa", "model.mixer.top_k=5"),
}
SMALL = (
    "model.dim=16,model.n_layers=2,model.vocab_size=24,model.mlp.dim=12,train.seq_len=13,model.loss_chunk=8,"
    "model.scan_layers=True"
)
SIZES = {
    "heads": 4, "head_dim": 4, "chunk_size": 4, "state": 3, "dt_rank": 3, "shift_rank": 3, "decay_rank": 3,
    "eta_rank": 3, "value_rank": 3, "gate_rank": 3, "rope_base": 1e4, "blocks": 4,
}  # fmt: skip
# head_dim = width / heads
NO_HEAD_DIM = {
    "transformer", "transformer_pp", "fox", "mla", "nsa", "msa", "dsa", "path", "post_norm_attention", "top1_chunk",
    "top1_element", "wall", "parallax",
}  # fmt: skip


@functools.cache
def build(mixer: str, text: str) -> Model:
    """Return the model of `configs/FILE.py:debug,TEXT` at a tiny size."""
    file, override = IN_HYBRID.get(mixer, (mixer, ""))
    get_config = importlib.import_module(f"configs.{file}").get_config
    known = get_config(",".join(filter(None, ["debug", override]))).model.mixer
    wanted = SIZES if mixer not in NO_HEAD_DIM else {k: v for k, v in SIZES.items() if k != "head_dim"}
    sizes = [f"model.mixer.{k}={v}" for k, v in wanted.items() if k in known]
    config = from_config_dict(get_config(",".join(filter(None, ["debug", SMALL, *sizes, override, text]))))
    return Model(config.model, max_len=LENGTH)


def start(model: Model) -> str:
    return jax.jit(model.init).lower(jax.random.key(0)).as_text()


def tokens() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)


def forward(model: Model) -> str:
    return jax.jit(lambda p, t: model.loss(p, t)[0]).lower(model.shapes, tokens()).as_text()


def backward(model: Model) -> str:
    return jax.jit(jax.grad(lambda p, t: model.loss(p, t)[0])).lower(model.shapes, tokens()).as_text()


@functools.cache
def unchanged(mixer: str, also: str, program: types.FunctionType) -> str:
    return program(build(mixer, also))


# test_against_numpy.py compares the logits at another value of these settings.
COMPARED = ("norm_eps", "rope_base", "window", "selection", "top_k", "shortlist")


def is_slow(mixer: str, key: str, kind: str) -> bool:
    """Return whether a case that lowers a program is slow; quick tests use representative mixers only.

    Settings in COMPARED are quick for transformer_pp only.
    """
    lowers = kind in ("forward", "refused")
    return lowers and (mixer not in support.REPRESENTATIVE or (key in COMPARED and mixer != "transformer_pp"))


def cases():
    for key, (value, kind, *also) in MODEL.items():
        yield "transformer_pp", f"model.{key}", value, kind, ",".join(also)
    for mixer, settings in MIXERS.items():
        for key, (value, kind, *also) in settings.items():
            marks = [pytest.mark.slow] if is_slow(mixer, key, kind) else []
            yield pytest.param(mixer, f"model.mixer.{key}", value, kind, ",".join(also), marks=marks)


def changed(mixer: str, key: str, value, also: str) -> Model:
    return build(mixer, ",".join(filter(None, [also, f"{key}={value}"])))


@pytest.mark.parametrize(("mixer", "key", "value", "kind", "also"), list(cases()), ids=lambda x: str(x) or "-")
def test_setting_has_its_effect(mixer, key, value, kind, also):
    old, new = build(mixer, also), changed(mixer, key, value, also)
    if kind == "shapes":
        assert new.shapes != old.shapes, f"{key}={value}: same parameter shapes"
        return
    assert new.shapes == old.shapes
    if kind == "refused":
        with pytest.raises((ValueError, RuntimeError), match=f"{value}|cuDNN"):
            forward(new)
    elif kind == "start":
        assert start(new) != unchanged(mixer, also, start), f"{key}={value}: same initial values"
        assert forward(new) == unchanged(mixer, also, forward)
    elif kind == "backward":
        assert backward(new) != unchanged(mixer, also, backward), f"{key}={value}: same gradient program"
    else:
        assert forward(new) != unchanged(mixer, also, forward), f"{key}={value}: same loss program"


@pytest.mark.parametrize("program", [start, forward, backward])
def test_equal_settings_give_equal_programs(program):
    """Otherwise all comparisons above would pass."""
    build.cache_clear()
    first = program(build("top1_chunk", ""))
    build.cache_clear()
    assert program(build("top1_chunk", "")) == first


def flat(values: dict, prefix: str = "") -> set[str]:
    keys = set()
    for key, value in values.items():
        keys |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
    return keys


def test_all_settings_are_in_the_table():
    assert set(MIXERS) <= set(mixers.names())
    for mixer, settings in MIXERS.items():
        config = to_dict(build(mixer, "").config)
        assert flat(config["mixer"]) - {"name"} == set(settings), mixer
        shared = {key: value for key, value in config.items() if key != "mixer"}
        assert flat(shared) == set(MODEL)
