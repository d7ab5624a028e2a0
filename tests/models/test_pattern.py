"""Hybrids: several mixers in a layer pattern; scan, parallel and recurrent form, and counts."""

import importlib
from dataclasses import replace

import jax
import numpy as np
import pytest

from seqjax import testing
from seqjax.config import Config, from_config_dict, to_dict
from seqjax.errors import UserError
from seqjax.models import Model, flops
from tests import support
from tests.models import oracle

B, T = 2, 11


def hybrid(n_layers: int = 4, **overrides) -> Config:
    config = importlib.import_module("configs.transformer_pp").get_config("debug")
    window = {**config.model.mixer.to_dict(), "heads": 4, "window": 3}
    chunk = {"name": "top1_chunk", "heads": 2, "kv_heads": 1, "chunk_size": 4, "selection": "approx"}
    settings = {"model.dim": 32, "model.n_layers": n_layers, "model.vocab_size": 48, "train.seq_len": T}
    with config.ignore_type():
        config.model.mixer = (window, chunk)
        config.update_from_flattened_dict(settings | overrides)
    return from_config_dict(config)


def build(**overrides) -> Model:
    return Model(hybrid(**overrides).model, max_len=T)


def test_pattern_positions_have_their_own_params():
    model = build()
    params = jax.jit(model.init)(jax.random.key(0))
    assert params["blocks"]["0"]["mixer"]["k"]["w"].shape == (2, 32, 32)
    assert params["blocks"]["1"]["mixer"]["k"]["w"].shape == (2, 32, 16)
    gates = [np.asarray(params["blocks"][i]["mlp"]["gate"]["w"]) for i in "01"]
    assert not np.array_equal(gates[0], gates[1])


def test_scan_equals_unrolled_layers_in_order():
    tokens = support.random_tokens((B, T))
    scanned, unrolled = build(), build(**{"model.scan_layers": False})
    weights = support.random_params(scanned)
    want = jax.jit(unrolled.logits)(weights, tokens)
    np.testing.assert_allclose(jax.jit(scanned.logits)(weights, tokens), want, rtol=1e-5, atol=1e-5)
    # Layer order matters: swapping the two pattern repeats changes the logits.
    swapped = {**weights, "blocks": jax.tree.map(lambda x: x[::-1], weights["blocks"])}
    assert np.abs(np.asarray(jax.jit(scanned.logits)(swapped, tokens) - want)).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "attention"])
def test_remat_keeps_gradients(remat):
    tokens = support.random_tokens((B, T + 1))
    weights = support.random_params(build())
    plain, saved = (
        jax.jit(jax.grad(lambda p, m=m: m.loss(p, tokens)[0]))(weights)
        for m in (build(), build(**{"model.remat": remat}))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, saved)


def test_step_equals_the_parallel_form():
    model, tokens = build(), support.random_tokens((B, T))
    weights = support.random_params(model)
    want = jax.jit(model.logits)(weights, tokens)
    logits, cache = jax.jit(model.prefill)(weights, tokens[:, :5], model.init_cache(B, T))
    step = jax.jit(model.step)
    for t in range(5, T):
        np.testing.assert_allclose(logits, want[:, t - 1], rtol=1e-4, atol=1e-4)
        logits, cache = step(weights, tokens[:, t], np.int32(t), cache)
    np.testing.assert_allclose(logits, want[:, -1], rtol=1e-4, atol=1e-4)


RWKV7 = {"name": "rwkv7", "heads": 4, "decay_rank": 3, "eta_rank": 2, "value_rank": 5, "gate_rank": 4, "chunk_size": 4}
SHELL = {"name": "rwkv7_shell", "heads": 4, "core": "window", "window": 3, "value_rank": 3, "gate_rank": 4}
ATTENTION = {"name": "transformer_pp", "heads": 4}
PATTERNS = {
    "rwkv7 first": (RWKV7, ATTENTION, SHELL),
    "rwkv7 second": (ATTENTION, RWKV7, SHELL),
    "shell third": (ATTENTION, ATTENTION, SHELL),
    "shell before rwkv7": (ATTENTION, SHELL, RWKV7),
}


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scan", "unrolled"])
@pytest.mark.parametrize("pattern", support.slow_unless(lambda name: name in ("rwkv7 first", "shell third"), PATTERNS))
def test_first_rwkv7_layer_sets_the_value_residual(pattern, scan):
    """Six layers with the first RWKV-7 layer at any position, against the equations and in decoding."""
    model = build(**{"model.n_layers": 6, "model.mixer": PATTERNS[pattern], "model.scan_layers": scan})
    weights, tokens = support.random_params(model), support.random_tokens((B, T))
    want = jax.jit(model.logits)(weights, tokens)
    exact = oracle.logits(model.config, jax.device_get(weights), np.asarray(tokens))
    np.testing.assert_allclose(want, exact, rtol=0, atol=2e-4 * np.abs(exact).max())
    step, next_ = jax.jit(model.step), jax.jit(model.prefill_next)
    logits, cache = jax.jit(model.prefill)(weights, tokens[:, :4], model.init_cache(B, T))
    np.testing.assert_allclose(logits, want[:, 3], rtol=1e-4, atol=1e-4)
    logits, cache = next_(weights, tokens[:, 4:7], np.int32(4), cache)
    for t in range(7, T):
        np.testing.assert_allclose(logits, want[:, t - 1], rtol=1e-4, atol=1e-4)
        logits, cache = step(weights, tokens[:, t], np.int32(t), cache)
    np.testing.assert_allclose(logits, want[:, -1], rtol=1e-4, atol=1e-4)
    # In older runs only layer 0 can set these values; they stay zero if it is not RWKV-7.
    older = jax.jit(Model(model.config, max_len=T, carry_from_zero=True).logits)(weights, tokens)
    assert np.allclose(older, want, rtol=1e-4, atol=1e-4) == (pattern == "rwkv7 first")


def test_hybrid_flops_are_the_mean_over_its_mixers():
    config = hybrid().model

    def of(mixer, **changes):
        return flops.flops_per_token(Model(replace(config, mixer=mixer, **changes), max_len=T), T)

    parts = [of(mixer) for mixer in config.mixers]
    assert flops.flops_per_token(build(), T) == pytest.approx(sum(parts) / 2)


def test_config_round_trip():
    config = hybrid()
    assert from_config_dict(to_dict(config)) == config


def test_pattern_errors_name_the_setting():
    with pytest.raises(UserError, match=r"2 mixers.*config\.model\.n_layers=3"):
        hybrid(n_layers=3)
    config = importlib.import_module("configs.transformer_pp").get_config("debug")
    with config.ignore_type():
        config.model.mixer = ({"name": "top1_chunk", "heads": 2, "chunk": 4},)
    with pytest.raises(UserError, match=r"config\.model\.mixer\[0\]\.chunk.*chunk_size"):
        from_config_dict(config)


# ----------------------------------------------------------------------------------------------------------- Based
def based() -> Model:
    config = importlib.import_module("configs.based").get_config("debug")
    with config.ignore_type():
        for mixer in config.model.mixer:
            mixer.update({k: v for k, v in {"heads": 2, "feature_dim": 3, "window": 4}.items() if k in mixer})
        config.update_from_flattened_dict({"model.dim": 16, "model.vocab_size": 48, "model.mlp.dim": 24})
    return Model(from_config_dict(config).model, max_len=T)


def test_based_layer_positions():
    config = from_config_dict(importlib.import_module("configs.based").get_config("110m")).model
    names = [config.mixers[i % 5].name for i in range(config.n_layers)]
    assert len(names) == 15
    assert [i for i, name in enumerate(names) if name == "based_linear"] == [1, 6, 11]
    assert [i for i, name in enumerate(names) if name == "transformer_pp"] == [2, 7, 12]
    assert names.count("based_conv") == 9
    assert (config.mixers[2].window, config.mixers[2].heads, config.mixers[1].heads) == (128, 12, 12)


# ------------------------------------------------------------------------------------------------- published hybrids
RECURRENT = {
    "kimi_linear": "kda",
    "kimi_k3": "kda",
    "qwen3_next": "gated_deltanet",
    "olmo_hybrid": "gated_deltaproduct",
}
RECURRENT |= {"gated_deltanet_hybrid": "gated_deltanet"}
RECURRENT |= {f"ablations.hybrid_{part}": "gated_deltanet" for part in ("no_gate", "rope", "no_qk_norm")}


@pytest.mark.parametrize("name", RECURRENT)
def test_attention_is_in_every_fourth_layer(name):
    """Attention is in layers 4, 8 and 12; the other layers have the recurrent mixer, with half the heads."""
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config("110m")).model
    of_layer = [config.mixers[i % len(config.mixers)] for i in range(config.n_layers)]
    assert [i + 1 for i, mixer in enumerate(of_layer) if mixer.name != RECURRENT[name]] == [4, 8, 12]
    assert [mixer.heads for mixer in of_layer[:4]] == [6, 6, 6, 12]
    assert flops.n_params(Model(config, max_len=2048)) == pytest.approx(109.5e6, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECURRENT if not name.startswith("ablations")])
def test_hybrid_step_equals_the_parallel_form(name):
    sizes = "debug,model.dim=32,model.vocab_size=48,model.mlp.dim=48,train.seq_len=23"
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config(sizes))
    case = testing.Case(Model(config.model, max_len=23))
    testing.check_step(case, [5])
    testing.check_pieces(case)


def test_the_reference_hybrid_is_switched_one_part_at_a_time():
    configs = (
        importlib.import_module("configs.gated_deltanet_hybrid"),
        *(importlib.import_module(f"configs.ablations.hybrid_{part}") for part in ("no_gate", "rope", "no_qk_norm")),
    )
    reference, *others = (from_config_dict(module.get_config("110m")).model for module in configs)
    *deltanet, attention = reference.mixers
    changes: list[dict] = [{"gate": False}, {"position": "rope"}, {"qk_norm": False}]
    assert others == [replace(reference, mixer=(*deltanet, replace(attention, **change))) for change in changes]


@pytest.mark.slow
def test_based_step_equals_the_parallel_form():
    model, tokens = based(), support.random_tokens((B, T))
    weights = support.random_params(model)
    want = jax.jit(model.logits)(weights, tokens)
    logits, cache = jax.jit(model.prefill)(weights, tokens[:, :6], model.init_cache(B, T))
    step = jax.jit(model.step)
    for t in range(6, T):
        np.testing.assert_allclose(logits, want[:, t - 1], rtol=2e-4, atol=2e-4)
        logits, cache = step(weights, tokens[:, t], np.int32(t), cache)
    np.testing.assert_allclose(logits, want[:, -1], rtol=2e-4, atol=2e-4)
