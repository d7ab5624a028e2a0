"""Muon and NorMuon: the public form, stacks, parameters of every config, eight devices, resume."""

import dataclasses
import functools
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seqjax.config import OptimConfig, from_config_dict, presets
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.nn.params import names
from seqjax.sharding import batch_sharding, make_mesh
from seqjax.training import loop, muon
from seqjax.training.schedule import optimizer, update_rules
from seqjax.training.step import init_state, jit_train_step, make_train_step, state_shardings
from tests import support
from tests.chaos.kills import assert_equal_runs

LAYERS, STEPS, DECAY = 3, 3, 0.95
SHAPES = {"tall": (96, 64), "wide": (64, 80), "square": (72, 72)}
TRANSFORMS = {"muon": muon.scale_by_muon, "normuon": muon.scale_by_normuon}


def gradients() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{key: rng.normal(size=(LAYERS, *shape)) for key, shape in SHAPES.items()} for _ in range(STEPS)]


def newton_schulz(u: np.ndarray) -> np.ndarray:
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def public_form(name: str, scale: str, matrices: list[np.ndarray]) -> np.ndarray:
    """Return the last update of one matrix [in, out] from its gradients, in float64."""
    m, v, update = np.zeros_like(matrices[0]), 0.0, np.zeros_like(matrices[0])
    n_in, n_out = m.shape
    factor = math.sqrt(max(1, n_out / n_in)) if scale == "spectral" else 0.2 * math.sqrt(max(n_in, n_out))
    for t, g in enumerate(matrices, start=1):
        m = DECAY * m + (1 - DECAY) * g
        if name == "muon":
            u = DECAY * m / (1 - DECAY ** (t + 1)) + (1 - DECAY) * g / (1 - DECAY**t)
            update = newton_schulz(u)
        else:
            x = newton_schulz(g + DECAY * (m - g))
            v = 0.95 * v + 0.05 * (x**2).mean(0)
            normed = x / (np.sqrt(v) + 1e-10)
            update = normed * np.linalg.norm(x) / np.linalg.norm(normed)
    return factor * update


def last_update(transform: optax.GradientTransformation, grads) -> dict[str, np.ndarray]:
    state, updates = transform.init(grads[0]), {}
    for g in grads:
        updates, state = jax.jit(transform.update)(g, state)
    return jax.device_get(updates)


@pytest.mark.parametrize("scale", ["spectral", "rms"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_updates_match_the_public_form(name, scale):
    """Every layer of a stack, in float64."""
    with jax.enable_x64(True):
        updates = last_update(TRANSFORMS[name](DECAY, scale=scale), jax.tree.map(jnp.asarray, gradients()))
    for key in SHAPES:
        for layer in range(LAYERS):
            expected = public_form(name, scale, [g[key][layer] for g in gradients()])
            np.testing.assert_allclose(updates[key][layer], expected, rtol=0, atol=1e-12)


def test_muon_matches_optax():
    with jax.enable_x64(True):
        grads = jax.tree.map(jnp.asarray, gradients())
        numbers = dict.fromkeys(SHAPES, optax.contrib.MuonDimensionNumbers(1, 2))
        expected = last_update(optax.contrib.scale_by_muon(weight_dimension_numbers=numbers), grads)
        updates = last_update(muon.scale_by_muon(DECAY, scale="spectral"), grads)
    for key, shape in SHAPES.items():
        np.testing.assert_allclose(updates[key], muon.factor(shape, "spectral") * expected[key], rtol=0, atol=1e-7)


# Config -> matrices that are too narrow for Muon.
NARROW = {
    "based": set(),
    "deltanet": {"mixer.beta.w"},
    "fox": {"mixer.forget.w"},
    "gated_deltanet": {"mixer.beta.w", "mixer.decay.w"},
    "gated_deltaproduct": {"mixer.beta.w", "mixer.decay.w"},
    "gla": {"mixer.decay_in.w", "mixer.decay_out.w"},
    "kda": {"mixer.beta.w"},
    "log_linear_mamba2": {"mixer.dt.w"},
    "mamba1": {"mixer.bc.w", "mixer.delta.w", "mixer.dt.w"},
    "mamba2": {"mixer.dt.w"},
    "mamba3": {"mixer.angle.w", "mixer.dt.w", "mixer.rate.w", "mixer.trap.w"},
    "mlstm": {"mixer.forget.w", "mixer.input.w"},
    "moba": set(),
    "nsa": {"mixer.gate.w"},
    "path": {"mixer.beta.w", "mixer.w_in.w", "mixer.w_out.w"},
    "rwkv5": set(),
    "rwkv6": {"mixer.w2"},
    "rwkv7": {"mixer.v_lora.a", "mixer.v_lora.b"},
    "rwkv7_shell": {"mixer.v_lora.a", "mixer.v_lora.b"},
    "top1_chunk": set(),
    "top1_element": set(),
    "transformer": set(),
    "transformer_pp": set(),
}


@pytest.mark.parametrize("config", sorted({*NARROW, *(name for name in presets.names() if "/" not in name)}))
def test_parameters_of_every_config(config):
    """At 110m, Adam has vectors, embeddings, convolutions and narrow matrices; Muon has all other matrices."""
    model = Model(from_config_dict(presets.read_config(f"{config}:110m")).model, max_len=2048)
    rules, groups = dict(names(update_rules(model.groups, model.shapes))), dict(names(model.groups))
    assert {groups[path] for path, rule in rules.items() if rule == "muon"} <= {"matrix", "auxiliary"}
    narrow = {path.split(".", 2)[2] for path, group in groups.items() if group == "matrix" and rules[path] == "adam"}
    if config in NARROW:
        assert narrow == NARROW[config]
    assert rules["embed"] == "adam"
    assert all(rules[path] == "muon" for path in rules if path.endswith(("mixer.out.w", "mixer.q.w", "mlp.down.w")))


def model_of(n_layers=2, **overrides):
    return support.tiny_model(
        "transformer_pp", model__dim=64, model__mlp__dim=96, model__n_layers=n_layers, **overrides
    )


SETTINGS = OptimConfig(name="muon", lr=0.02, adam_lr=0.002, weight_decay=0.1, clip_norm=None)


def test_chain_has_two_rates_and_decays_matrices():
    """At a rate of 1: Muon's update, or Adam's times 0.1, and weight decay on matrices by both rules."""
    model = model_of(model__mixer__kv_heads=2)  # k and v are 64 x 32, too narrow
    params = support.random_params(model)
    grads = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), params)
    transform = optimizer(SETTINGS, model.groups)
    updates = jax.jit(lambda: transform.update(grads, transform.init(params), params)[0])()
    rules, groups, weights = (dict(names(t)) for t in (update_rules(model.groups, params), model.groups, params))
    matrices = {path: rule for path, rule in rules.items() if groups[path] == "matrix"}
    assert {path.split(".")[3] for path, rule in matrices.items() if rule == "adam"} == {"k", "v"}
    for (path, update), (_, g) in zip(names(updates), names(grads), strict=True):
        decay = 0.1 * weights[path] if path in matrices else 0.0
        if rules[path] == "muon":
            expected = np.stack([public_form("muon", "spectral", [np.asarray(x, np.float64)]) for x in g])
            np.testing.assert_allclose(update, -(expected + decay), atol=2e-4)
        else:  # the first step of Adam, not NAdam, is the sign
            np.testing.assert_allclose(update, -0.1 * (np.sign(g) + decay), atol=1e-4)


def test_muon_without_groups_or_matrices_is_refused():
    with pytest.raises(UserError, match=r"config\.optim\.name='muon' .*parameter groups.*--workdir"):
        optimizer(SETTINGS)
    small = support.tiny_model("transformer_pp")
    with pytest.raises(UserError, match=r"config\.optim\.name='muon'.*config\.model\.dim"):
        optimizer(SETTINGS, small.groups).init(small.shapes)
    larger = support.tiny_model("transformer_pp", model__dim=64)
    jax.eval_shape(optimizer(SETTINGS, larger.groups).init, larger.shapes)


@pytest.mark.skipif(jax.device_count() != 8, reason="needs eight devices (XLA_FLAGS sets another number)")
@pytest.mark.parametrize("name", support.slow_unless(lambda name: name == "muon", TRANSFORMS))
def test_step_on_eight_devices_equals_one(name):
    """Data, FSDP and tensor axes; two layers, so that `whole_matrices` splits the stack over one of them."""
    model, tokens = model_of(), support.random_tokens((1, 8, 24))
    transform = optimizer(dataclasses.replace(SETTINGS, name=name), model.groups)
    shapes = jax.eval_shape(lambda: init_state(model, transform, jax.random.key(0)))
    state = init_state(model, transform, jax.random.key(0))
    expected, metrics = jax.jit(make_train_step(model, transform))(state, tokens, np.float32(0.02))
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    by_leaf, by_token = state_shardings(mesh, model, transform, shapes), batch_sharding(mesh, leading=1)
    assert jax.tree.structure(by_leaf) == jax.tree.structure(shapes)
    with jax.set_mesh(mesh):
        step = jit_train_step(model, transform, state=by_leaf, tokens=by_token)
        found, found_metrics = step(
            jax.device_put(state, by_leaf), jax.device_put(tokens, by_token), jax.device_put(np.float32(0.02))
        )
    assert float(found_metrics["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    for (path, a), (_, b) in zip(names(found.params), names(expected.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=path)
    for a, b in zip(jax.tree.leaves(found.opt_state), jax.tree.leaves(expected.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


def test_resumed_run_is_bit_equal(blocks_dir, tmp_path, monkeypatch):
    """NorMuon with a cosine decay, from the checkpoint at half of the run."""
    monkeypatch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))
    optim = {"optim__name": "normuon", "optim__adam_lr": 1e-3, "optim__schedule": "cosine"}
    sizes = {"model__dim": 64, "model__n_layers": 1, "train__batch_size": 2, "eval__tokens": 2 * support.SEQ_LEN}
    steps = {"train__steps": 4, "checkpoint__every": 2, "eval__every": 0}
    config = support.run_config(blocks_dir, "transformer_pp", **optim, **sizes, **steps)
    assert loop.train(config, tmp_path / "whole")
    assert "normuon, cosine" in (tmp_path / "whole" / "report.md").read_text()
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "resumed" / "eval_losses")
    assert loop.train(config, tmp_path / "resumed")
    assert_equal_runs(tmp_path / "resumed", tmp_path / "whole")
