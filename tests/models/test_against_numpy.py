"""Full models against their equations in float64 numpy (oracle.py), for all settings that change the computation."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.config import from_config_dict
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.models.entropy import mean_entropy, queries_and_keys
from tests import support
from tests.models import oracle
from tests.models.test_settings import MIXERS

B, T = 2, 13  # three chunks of 4 and a token
SMALL = {
    "model.dim": 16,
    "model.n_layers": 2,
    "model.vocab_size": 24,
    "model.mlp.dim": 12,
    "model.loss_chunk": 8,
    "train.seq_len": T,
}
SIZES = {
    "heads": 4, "chunk_size": 4, "head_dim": 4, "state": 3, "dt_rank": 2, "shift_rank": 3, "decay_rank": 2,
    "eta_rank": 3, "value_rank": 2, "gate_rank": 4, "window": 3, "feature_dim": 3,
    "block_size": 2, "blocks": 4,
}  # fmt: skip
ATTENTION = {
    "default": "",
    "sizes": "heads=6,kv_heads=2,head_dim=4,rope_base=37.0",
    "bias": "bias=True,position=none",
    "conv": "conv=True,kv_heads=2,gate=True",
}
# Settings under `model.mixer` by config. A variant has several settings, because all of them must be right to pass.
VARIANTS = {
    "transformer_pp": ATTENTION | {
        "qk_norm": "qk_norm=True,window=5",
        "llama3": "rope_scaling=llama3,rope_factor=4,rope_low_freq_factor=0.2,rope_high_freq_factor=1,"
        "rope_original_len=8,rope_base=37.0,head_dim=12,qkv_bias=True",
        "linear": "rope_scaling=linear,rope_factor=3,qk_norm=True,qk_norm_eps=0.3,bias=True,qkv_bias=False",
        "alibi": "position=alibi,heads=6,head_dim=4,window=5",
        "temperature": "temperature=0.4",
        "const_k": "const=k,temperature=2.0",
        "const_qk": "const=qk,kv_heads=2",
        "conv_norm": "conv=True,qk_norm=True,bias=True,window=5",
        "gate_qk": "const=qk,gate=True",
        "share": "rope_share=0.5,head_dim=4,qk_norm=full,qk_norm_eps=0.3,kv_heads=2,gate=True,rope_base=37.0",
    },
    "top1_chunk": ATTENTION | {
        "approx": "selection=approx,chunk_size=3", "best_key": "selection=best_key,chunk_size=3",
        "top_k": "chunk_size=3,top_k=2", "shortlist": "selection=shortlist,chunk_size=3,shortlist=2",
        "no_norm": "qk_norm=False,rope_base=37.0", "share": "rope_share=0.5,qk_norm=full,selection=approx,chunk_size=3",
    },
    "top1_element": ATTENTION | {"no_norm": "qk_norm=False,rope_base=37.0", "share": "rope_share=0.5,qk_norm=full"},
    "fox": {
        "default": "", "sizes": "heads=6,kv_heads=2,head_dim=4,window=5", "conv": "conv=True,qk_norm=True,norm_eps=0.3",
        "pro": "kv_shift=True,qk_norm=True,output_gate=True,kv_heads=2,norm_eps=0.3",
    },
    "path": {
        "default": "", "sizes": "heads=6,kv_heads=2,head_dim=4,path_rank=3,conv_width=2",
        "gates": "forget_gate=True,qk_norm=True,norm_eps=0.3,kv_heads=2",
    },
    "nsa": {
        "default": "", "sizes": "heads=6,kv_heads=2,head_dim=4,rope_base=37.0,block_size=3,window=5",
        "conv": "conv=True,qk_norm=True,position=none,block_size=1,blocks=3", "alone": "kv_heads=4,window=40",
        "share": "rope_share=0.5,qk_norm=full,heads=4,kv_heads=2",
    },
    "msa": {
        "default": "", "conv": "conv=True,qk_norm=False,position=none,block_size=1,blocks=2,gate=True",
        "sizes": "heads=6,kv_heads=2,head_dim=4,rope_base=37.0,block_size=3,blocks=3,index_dim=6,index_rope=4,"
        "norm_eps=0.3,rope_share=0.5",
    },
    "dsa": {
        "default": "top_k=5", "conv": "conv=True,qk_norm=True,gate=True,position=none,top_k=1,index_rope=0",
        "sizes": "heads=6,kv_heads=2,head_dim=4,rope_base=37.0,top_k=3,index_heads=3,index_dim=6,index_rope=4,"
        "rope_share=0.5,qk_norm=full",
    },
    "mamba1": {
        "default": "", "one": "decay=one", "one_dt": "decay=one_dt,conv_width=2", "none": "decay=none,expand=1",
        "no_conv": "conv=False",
    },
    "mamba2": {
        "default": "", "one": "decay=one,norm=False", "none": "decay=none,expand=1,conv_width=2",
        "no_conv": "conv=False,head_dim=8", "no_gate": "gate=False", "neither": "gate=False,norm=False",
    },
    "log_linear_mamba2": {"default": "", "levels": "levels=3,chunk_size=4,head_dim=8,state=5,expand=1,conv_width=2"},
    "mamba3": {"default": "", "norm": "rate=softplus,norm=True,angles=2,state=5,head_dim=8"},
    "deltanet": {
        "default": "", "no_conv": "conv=False", "sizes": "heads=2,key_dim=8,value_dim=12,norm_eps=0.3,conv_width=2",
    },
    "gated_deltanet": {
        "default": "", "eps": "heads=2,norm_eps=0.3", "bare": "conv=False,gate=False",
        "value_heads": "heads=2,value_heads=6,key_dim=8,value_dim=12,norm_eps=0.3",
    },
    "gated_deltaproduct": {
        "default": "", "one_step": "steps=1,allow_negative_eigenvalues=False,conv_width=2",
        "sizes": "heads=2,steps=3,decay=False,key_dim=12,value_dim=8,norm_eps=0.3", "bare": "conv=False,gate=False",
    },
    "mlstm": {
        "default": "", "sizes": "heads=2,key_dim=12,value_dim=8,norm_eps=0.3,gate_cap=2.0", "no_gate": "gate=False",
    },
    "gla": {"default": "", "sizes": "heads=2,key_dim=12,value_dim=8,norm_eps=0.3", "no_gate": "gate=False"},
    "kda": {
        "default": "", "bounded": "lower_bound=-5.0,conv_width=2",
        "sizes": "heads=2,key_dim=8,value_dim=12,norm_eps=0.3", "bare": "conv=False,gate=False",
        "channel_gates": "channel_gates=True,heads=2,key_dim=8,value_dim=12",
        "full_gate": "gate_rank=full,lower_bound=-5.0,key_dim=8,value_dim=12",
    },
    "mla": {
        "default": "", "none": "position=none,gate=True",
        "sizes": "head_dim=6,shared_dim=4,value_head_dim=12,kv_rank=5,q_rank=7,norm_eps=0.3,rope_base=37.0",
    },
    "comba": {
        "default": "", "sizes": "heads=2,key_dim=8,value_dim=12,norm_eps=0.3,conv_width=2,inner_decay=False",
        "bare": "conv=False,gate=False,correction=None",
    },
    "precond_gated_deltanet": {
        "default": "", "sizes": "heads=2,key_dim=8,value_dim=12,norm_eps=0.3,precond_bound=2.0",
        "bare": "conv=False,gate=False",
    },
    "precond_kda": {
        "default": "", "sizes": "heads=2,key_dim=8,value_dim=12,norm_eps=0.3,lower_bound=-5.0,precond_bound=2.0",
        "bare": "conv=False,gate=False",
    },
    "mesa_net": {
        "default": "", "sizes": "heads=2,key_dim=8,value_dim=12,norm_eps=0.3,conv_width=2,min_ridge=0.5,gate=True",
        "bare": "conv=False",
    },
    "ttt_linear": {
        "default": "mini_batch=4", "sizes": "heads=2,mini_batch=5,base_lr=3.0,norm_eps=0.3,conv_width=2",
        "base": "mini_batch=5,conv=False,gate=False",
    },
    "parallax": {
        "default": "", "sizes": "heads=6,kv_heads=2,head_dim=4,rope_base=37.0,qk_norm=True,gate=True",
        "none": "position=none",
    },
    "wall": {"default": "", "sizes": "heads=6,kv_heads=2,head_dim=4,qk_norm=True,gate=True"},
    "rwkv5": {"default": ""},
    "rwkv6": {"default": "", "head_dim": "head_dim=8"},
    "rwkv7": {"default": ""},
    "rwkv7_shell": {
        "default": "rope_base=37.0", "approx": "core=top1_approx,chunk_size=3", "window": "core=window",
        "best_key": "core=top1_best_key,chunk_size=3",
        "no_shift": "core=full,token_shift=False,value_residual=False", "bare": "gate=False,head_norm=False",
        "full_norm": "core=full,qk_norm=True", "window_norm": "core=window,qk_norm=True", "no_norm": "qk_norm=False",
    },
    "based": {"default": ""},
}  # fmt: skip
MODELS = {
    "gpt": ("transformer", "model.norm_eps=0.3"),
    "layernorm": ("transformer_pp", "model.norm=layernorm,model.mlp.kind=gelu,model.mlp.bias=True,model.mlp.dim=None"),
    "swiglu": ("transformer_pp", "model.mlp.kind=swiglu,model.embed_norm=True,model.tie_embeddings=False"),
    "tanh": ("transformer_pp", "model.mlp.approximate_gelu=True,model.learned_positions=True,model.mlp.dim=None"),
    "no_mlp": ("transformer_pp", "model.mlp.kind=none,model.n_layers=3,model.scan_layers=False"),
    "pattern": ("based", "model.scan_layers=False"),
    "canon": ("transformer_pp", "model.canon=ACD,model.token_shift=True,model.mixer.conv=True,model.mixer.gate=True"),
    "canon_gpt": ("transformer", "model.canon=CD"),
    "canon_a": ("mamba2", "model.canon=A"),
    "shift": ("gated_deltanet", "model.token_shift=True,model.canon=D"),
    "post_norm": ("olmo_hybrid", "model.mixer[3].position=rope,model.mixer[3].kv_heads=2"),
    "sources": ("transformer_pp", "model.attn_residual=3,model.n_layers=4,model.canon=AC,model.norm=layernorm"),
    "sources_hybrid": ("based", "model.attn_residual=1,model.scan_layers=False"),
}
CASES = [
    (name, f"{name}-{variant}", ",".join(f"model.mixer.{s}" for s in text.split(",") if s))
    for name, variants in VARIANTS.items()
    for variant, text in variants.items()
] + [(name, f"model-{label}", text) for label, (name, text) in MODELS.items()]
# Slow: the same attention in another mixer, and disabled settings.
SLOW = {f"top1_{kind}-{variant}" for kind in ("chunk", "element") for variant in ("sizes", "bias")}
SLOW |= {"rwkv7_shell-window_norm", "rwkv7_shell-no_norm"}
SLOW |= {"top1_element-no_norm", "mamba1-none", "mamba1-no_conv", "mamba2-none", "mamba2-no_conv", "rwkv7_shell-bare"}
# Slow: defaults of mixers with a more complete case, and settings that other cases include.
SLOW |= {f"{name}-default" for name in ("fox", "nsa", "gated_deltaproduct", "gated_deltanet", "kda", "gla", "rwkv6")}
SLOW |= {"comba-bare", "comba-default", "precond_gated_deltanet-default", "precond_kda-default", "precond_kda-bare"}
SLOW |= {"parallax-default", "parallax-none", "wall-default", "precond_gated_deltanet-bare", "model-sources_hybrid"}
SLOW |= {"msa-default", "msa-conv", "dsa-default", "dsa-conv"}
SLOW |= {"mesa_net-default", "mesa_net-bare", "ttt_linear-default", "ttt_linear-base"}
SLOW |= {"transformer_pp-bias", "transformer_pp-conv_norm", "transformer_pp-const_k", "nsa-alone", "mamba1-one"}
SLOW |= {"deltanet-no_conv", "mamba2-one", "mamba2-no_gate", "model-canon_gpt"}
SLOW |= {"top1_element-default", "rwkv7_shell-best_key", "rwkv7_shell-full_norm", "mla-default"}
SLOW |= {"top1_element-share", "nsa-share"}
# Slow: quick tests compare these layers with public code (tests/golden) or with another form.
SLOW |= {"mla-none", "kda-full_gate", "gated_deltanet-value_heads", "model-post_norm"}
all_cases = pytest.mark.parametrize(
    ("name", "text"), [pytest.param(n, t, id=i, marks=[pytest.mark.slow] if i in SLOW else []) for n, i, t in CASES]
)


@functools.cache
def build(name: str, text: str = ""):
    """Return the model of `configs/NAME.py:debug,TEXT` at a size small enough for Python loops."""
    get_config = importlib.import_module(f"configs.{name}").get_config
    config = get_config("debug")
    is_hybrid = isinstance(config.model.mixer, tuple)
    settings = {key: value for key, value in SMALL.items() if key != "model.n_layers" or not is_hybrid}
    sizes = {f"model.mixer.{key}": value for key, value in SIZES.items() if not is_hybrid and key in config.model.mixer}
    overrides = dict(part.split("=") for part in text.split(",") if part)
    settings = {key: value for key, value in (settings | sizes).items() if key not in overrides}
    if name in ("transformer_pp", "fox"):
        settings.pop("model.mixer.window", None)
        settings.pop("model.mixer.head_dim", None)
    merged = {key: str(value) for key, value in settings.items()} | overrides
    config = get_config(",".join(["debug", *(f"{key}={value}" for key, value in merged.items())]))
    for mixer in config.model.mixer if is_hybrid else ():
        with config.ignore_type():
            mixer.update({key: value for key, value in SIZES.items() if key in mixer and key != "head_dim"})
    return Model(from_config_dict(config).model, max_len=T)


def tokens(length: int = T):
    return support.random_tokens((B, length), vocab_size=24, seed=3)


@functools.cache
def weights(name: str, text: str = ""):
    """Return random parameters, with gains around one, so no value has a special effect."""
    rng = np.random.default_rng(0)

    def draw(path, x):
        spread = 1.0 if path[-1].key == "table" else 0.3
        return spread * rng.standard_normal(x.shape, np.float32) + (path[-1].key == "g")

    return jax.tree_util.tree_map_with_path(draw, build(name, text).shapes)


@all_cases
def test_logits_equal_the_equations(name, text):
    got = jax.jit(build(name, text).logits)(weights(name, text), tokens())
    want = oracle.logits(build(name, text).config, weights(name, text), np.asarray(tokens()))
    assert want.std() > 0.1
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())


def test_all_mixers_with_a_settings_table_are_compared():
    """A new mixer may have neither a table in test_settings.py nor an oracle."""
    used = {m.name for name, text in {(n, t) for n, _, t in CASES} for m in build(name, text).config.mixers}
    assert used == set(MIXERS)


# ------------------------------------------------------------------------------------------------------------- entropy
ENTROPY = [
    ("transformer", ""),
    ("transformer_pp", "model.mixer.temperature=0.4"),
    ("transformer_pp", "model.mixer.window=5,model.mixer.position=alibi,model.mixer.kv_heads=2"),
    ("transformer_pp", "model.mixer.const=k"),
    ("transformer_pp", "model.mixer.const=qk,model.mixer.qk_norm=True"),
    ("transformer_pp", "model.mixer.conv=True,model.mixer.kv_heads=2"),
    ("transformer_pp", "model.canon=A,model.token_shift=True"),
    ("transformer_pp", "model.attn_residual=2,model.n_layers=3"),
    ("fox", "model.mixer.window=5,model.mixer.kv_heads=2"),
    ("mla", "model.mixer.q_rank=7"),
    ("olmo_hybrid", ""),
    ("rwkv7_shell", "model.mixer.core=full"),
    ("rwkv7_shell", "model.mixer.core=full,model.mixer.qk_norm=True"),
    ("rwkv7_shell", "model.mixer.core=window,model.mixer.window=6"),
]


QUICK = [ENTROPY[i] for i in (2, 4, 5, 8, 9, 12)]


@pytest.mark.parametrize(("name", "text"), support.slow_unless(lambda *case: case in QUICK, ENTROPY))
def test_entropy_equals_the_equations(name, text):
    got = jax.jit(functools.partial(mean_entropy, build(name, text)))(weights(name, text), tokens())
    want = oracle.attention_entropy(build(name, text).config, weights(name, text), np.asarray(tokens()))
    assert (want[1] < 0.97).all()  # not uniform weights, which any implementation would match
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


# --------------------------------------------------------------------------------------------------- queries and keys
SCORED = [
    ("top1_chunk", ""),
    ("top1_chunk", "model.mixer.kv_heads=2,model.mixer.position=none"),
    ("top1_element", ""),
    ("transformer_pp", "model.mixer.const=qk"),
    ("transformer_pp", "model.mixer.conv=True,model.mixer.kv_heads=2"),
    ("top1_chunk", "model.mixer.conv=True"),
    ("top1_chunk", "model.canon=A,model.token_shift=True"),
    ("top1_chunk", "model.attn_residual=1"),
    ("fox", "model.mixer.kv_shift=True,model.mixer.qk_norm=True"),
    ("nsa", "model.mixer.conv=True,model.mixer.kv_heads=2"),
    ("mla", "model.mixer.position=none"),
    ("rwkv7_shell", ""),
    ("rwkv7_shell", "model.mixer.core=full,model.mixer.qk_norm=True"),
    ("based", ""),  # a hybrid with queries and keys in one mixer of three
    ("based", "model.scan_layers=False"),
]


@pytest.mark.parametrize(("name", "text"), support.slow_unless(lambda *case: case in (SCORED[0], SCORED[5]), SCORED))
def test_queries_and_keys_equal_the_equations(name, text):
    """For all layers in order."""
    model = build(name, text)
    got = jax.jit(functools.partial(queries_and_keys, model))(weights(name, text), tokens())
    for b, row in enumerate(np.asarray(tokens())):
        want = oracle.queries_and_keys_of_layers(model.config, weights(name, text), row)
        assert [pair is None for pair in got] == [pair is None for pair in want]
        for ours, theirs in zip(got, want, strict=True):
            if ours is None or theirs is None:
                continue
            q_THK, k_TGK = (np.asarray(x[b]) for x in ours)
            k_THK = np.repeat(k_TGK, q_THK.shape[1] // k_TGK.shape[1], axis=1)
            np.testing.assert_allclose(q_THK, theirs[0], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(k_THK, theirs[1], rtol=1e-4, atol=1e-5)


def test_model_without_queries_and_keys_is_refused():
    model = build("mamba2")
    with pytest.raises(UserError, match=r"mamba2: .*queries .*--config=top1_chunk"):
        jax.eval_shape(functools.partial(queries_and_keys, model), model.shapes, tokens())


# ---------------------------------------------------------------------------------------------- straight-through values
@pytest.mark.parametrize("v_grad", ["hard", "soft"])
def test_top1_element_value_gradient(v_grad, monkeypatch):
    """One layer, so scores do not depend on the values; compared with finite differences of the loss in float64.

    hard: differences of the loss itself. soft: differences of a loss whose output is the chosen value plus the
    softmax-weighted mean of all value changes.
    """
    name, text = "top1_element", f"model.n_layers=1,model.mixer.v_grad={v_grad}"
    model, params = build(name, text), jax.device_get(weights(name, text))
    rows = np.asarray(tokens(T + 1))
    gradient = jax.jit(jax.grad(lambda p: model.loss(p, jnp.asarray(rows))[0]))(params)["blocks"]["0"]["mixer"]["v"]
    direction = np.random.default_rng(5).standard_normal(gradient["w"].shape)
    originals = []

    def soft(m, q, k, v):
        chosen = oracle.top1_element(m, q, k, v)
        if len(originals) < B:
            originals.append((v, chosen))
            return chosen
        v0, chosen0 = originals[calls[0] % B]
        calls[0] += 1
        return chosen0 + np.einsum("ths,shv->thv", oracle.softmax_weights(m, q, k), v - v0)

    calls = [0]
    if v_grad == "soft":
        monkeypatch.setitem(oracle.CORES, name, soft)

    def loss(step):
        moved = oracle.as_float64(params)
        moved["blocks"]["0"]["mixer"]["v"]["w"] = moved["blocks"]["0"]["mixer"]["v"]["w"] + step * direction
        return oracle.loss(model.config, moved, rows)

    loss(0.0)
    slope = (loss(1e-4) - loss(-1e-4)) / 2e-4
    assert float(np.sum(np.asarray(gradient["w"], np.float64) * direction)) == pytest.approx(slope, rel=1e-3)


def test_loss_sums_over_predicted_tokens():
    """T + 1 tokens have T predictions, in nats; the evaluation losses agree per row."""
    name = "transformer_pp"
    model, params, rows = build(name), weights(name), tokens(T + 1)
    total, count = jax.jit(model.loss)(params, rows)
    assert float(count) == B * T
    want = [oracle.loss(model.config, params, rows[i : i + 1]) for i in range(B)]
    assert float(total) == pytest.approx(sum(want), rel=1e-5)
    np.testing.assert_allclose(jax.jit(model.sequence_losses)(params, rows), want, rtol=1e-5)
    np.testing.assert_allclose(np.sum(jax.jit(model.token_losses)(params, rows), axis=1), want, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------- residual stream
def test_float32_residual_stream_reduces_the_error():
    """Embeddings are scaled by 256, so a bfloat16 stream rounds away much of what the layers add."""
    name, text = "based", "model.dtype=bfloat16,model.n_layers=5"
    params = dict(jax.device_get(weights(name, text)))
    params["embed"] = 256 * params["embed"]
    rows = np.asarray(tokens())

    def error(residual):
        model = build(name, f"{text},model.residual_dtype={residual}")
        got = jax.jit(lambda p, t: model.hidden(p, t))({**params}, rows)
        p = oracle.as_float64(params)
        want = np.stack([oracle.norm(model.config, p["norm"], oracle.hidden(model.config, p, row)) for row in rows])
        return np.abs(np.asarray(got, np.float64) - want).mean()

    assert error("float32") < 0.7 * error("compute")
