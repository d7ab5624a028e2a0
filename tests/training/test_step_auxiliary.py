"""The auxiliary loss of a mixer: summed over layers, in training only, and clipped separately."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seqjax import mixers
from seqjax.config import OptimConfig, from_config_dict, presets
from seqjax.errors import UserError
from seqjax.mixers import _registry
from seqjax.mixers.base import AUXILIARY_LOSS
from seqjax.models import Model
from seqjax.models.block import PreNormBlock
from seqjax.nn.params import names
from seqjax.testing import random_params
from seqjax.training import metrics
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.mirrors import Mirror
from seqjax.training.schedule import optimizer
from seqjax.training.step import TrainState, make_train_step
from tests import support
from tests.mixers.probed import Probed

T, VOCABULARY = 11, 24
SMALL = {"dim": 8, "mlp.dim": 12, "vocab_size": VOCABULARY, "loss_chunk": 8, "n_layers": 2}
HYBRID = ({"name": "transformer_pp", "heads": 2}, {"name": "probed"})


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(_registry, "_registered", {})
    mixers.register("probed")(Probed)


def build(mixer=None, **settings):
    changes = {f"model.{key.replace('__', '.')}": value for key, value in (SMALL | settings).items()}
    config = presets.get_config("debug", name="x", mixer=mixer or {"name": "probed"}, settings=changes)
    return Model(from_config_dict(config).model, max_len=T)


def tokens(n_batch=4):
    return support.random_tokens((n_batch, T + 1), VOCABULARY)


def training(model, params, tokens_BT1):
    return jax.jit(model.training_loss)(params, tokens_BT1[:, :-1], tokens_BT1[:, 1:])


@functools.partial(jax.jit, static_argnums=0)
def layer_by_layer(model, params, tokens_BT1):
    """Return the sum of the losses of all layers, applied one by one without the model's loop."""
    x_BTD, total = model.embed(params, tokens_BT1[:, :-1]), 0.0
    for i in range(model.config.n_layers):
        slot, repeat = str(i % len(model.pattern)), i // len(model.pattern)
        layer = jax.tree.map(lambda x, at=repeat: x[at], params["blocks"][slot])
        block, carry = model.blocks[slot].bind(layer), {}
        if block.mixer.has_loss:
            total += block.mixer.call_with_loss(block.mixer_input(x_BTD, jnp.float32))[1]
        x_BTD, _ = block(x_BTD, carry, layer=jnp.int32(i), dtype=jnp.float32)
    return total


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        (None, {"scan_layers": False, "remat": "full", "canon": "AC"}),
        (HYBRID, {"n_layers": 4}),
        pytest.param(None, {"remat": "dots"}, marks=pytest.mark.slow),
        pytest.param(HYBRID, {"n_layers": 4, "scan_layers": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_adds_the_losses_of_all_layers(pattern, settings):
    """A carry that is dropped after the last layer would lose them without an error."""
    model = build(pattern, **settings)
    params = random_params(model)
    total, count, auxiliary = training(model, params, tokens())
    assert set(auxiliary) == {AUXILIARY_LOSS}
    want = float(layer_by_layer(model, params, tokens()))
    assert want > 0.01
    assert float(auxiliary[AUXILIARY_LOSS]) == pytest.approx(want, rel=1e-5)
    assert (float(total), float(count)) == pytest.approx([float(x) for x in jax.jit(model.loss)(params, tokens())])


def test_evaluation_and_decoding_do_not_compute_it(monkeypatch):
    monkeypatch.setattr(Probed, "__call__", lambda self, x_BTD: self.out(self.up(x_BTD)))
    monkeypatch.setattr(Probed, "call_with_loss", lambda self, x_BTD: pytest.fail("the loss was computed"))
    model = build()
    params, cache = model.shapes, jax.eval_shape(lambda: model.init_cache(4, T))
    for method in (model.loss, model.sequence_losses, model.token_losses):
        jax.eval_shape(method, params, tokens())
    jax.eval_shape(model.prefill, params, tokens(), cache)
    with pytest.raises(pytest.fail.Exception):
        jax.eval_shape(model.training_loss, params, tokens()[:, :-1], tokens()[:, 1:])


def test_a_model_without_such_a_mixer_has_none():
    model = build({"name": "transformer_pp", "heads": 2})
    assert model.auxiliary_losses == () and training(model, random_params(model), tokens())[2] == {}


@pytest.mark.parametrize("scan", [True, False])
def test_a_block_that_drops_the_loss_is_named(monkeypatch, scan):
    class Careless(PreNormBlock):
        def __call__(self, x_BTD, carry, *, layer, dtype):
            return x_BTD + self.mixer(self.mixer_input(x_BTD, dtype)), carry

    monkeypatch.setattr(Probed, "block", Careless)
    model = build(scan_layers=scan)
    jax.eval_shape(model.loss, model.shapes, tokens())
    with pytest.raises(UserError, match=r"^Careless .*Probed.*apply_mixer"):
        jax.eval_shape(model.training_loss, model.shapes, tokens()[:, :-1], tokens()[:, 1:])


def test_a_loss_per_token_is_refused(monkeypatch):
    monkeypatch.setattr(Probed, "call_with_loss", lambda self, x_BTD: (x_BTD, jnp.zeros(x_BTD.shape[:2])))
    model = build()
    with pytest.raises(UserError, match=r"Probed .*float32\[4, 11\] .*call_with_loss"):
        jax.eval_shape(model.training_loss, model.shapes, tokens()[:, :-1], tokens()[:, 1:])


def test_micro_batches_match_the_full_batch():
    model, transform = build(), optax.sgd(1.0)  # the update is the gradient
    step, params = jax.jit(make_train_step(model, transform)), random_params(model)
    state = TrainState(params, transform.init(params), jnp.int32(0), jnp.zeros(2, jnp.uint32))
    (whole, want), (parts, got) = (step(state, tokens(8).reshape(n, -1, T + 1), 1.0) for n in (1, 4))
    assert {"loss", AUXILIARY_LOSS, "grad_norm", "auxiliary_grad_norm"} < set(want) == set(got)
    for name in want:
        assert float(got[name]) == pytest.approx(float(want[name]), rel=1e-4)
    for (name, a), (_, b), (_, before) in zip(*map(names, (whole.params, parts.params, state.params)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.any(a != before), f"{name} has no gradient"


def test_each_loss_is_clipped_by_its_gradient_norm():
    """The size of the auxiliary loss does not change the update of other parameters."""
    model = build(HYBRID)
    groups, rng = dict(names(model.groups)), np.random.default_rng(0)
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), model.shapes)
    larger = {name: 1e3 if group == "auxiliary" else 1.0 for name, group in groups.items()}
    scaled = jax.tree.unflatten(jax.tree.structure(gradient), [larger[name] * x for name, x in names(gradient)])
    # With b1 = b2 = 0 and a large eps, Adam returns the clipped gradient divided by eps.
    transform = optimizer(OptimConfig(clip_norm=0.5, b1=0.0, b2=0.0, eps=1e4), model.groups)
    update = jax.jit(lambda x: transform.update(x, transform.init(x), x)[0])
    results = [dict(names(update(x))) for x in (gradient, scaled)]
    for name, group in groups.items():
        if group == "auxiliary":
            np.testing.assert_allclose(results[1][name], results[0][name], rtol=1e-5)
        else:
            np.testing.assert_array_equal(results[1][name], results[0][name])
    for is_auxiliary in (True, False):
        part = [x for name, x in results[0].items() if (groups[name] == "auxiliary") == is_auxiliary]
        assert 1e4 * float(optax.tree.norm(part)) == pytest.approx(0.5, rel=1e-3)


def test_weight_decay_leaves_the_group_alone():
    model = build()
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), model.shapes)
    transform = optimizer(OptimConfig(weight_decay=0.1), model.groups)
    zeros = jax.tree.map(jnp.zeros_like, ones)
    updates = dict(names(jax.jit(lambda x: transform.update(zeros, transform.init(x), x)[0])(ones)))
    assert not np.any(updates["blocks.0.mixer.probe.w"]) and np.any(updates["blocks.0.mixer.up.w"])


def test_a_loss_that_is_not_finite_is_named(tmp_path):
    values = {"loss": 2.0, AUXILIARY_LOSS: math.nan, "grad_norm": 1.0, "auxiliary_grad_norm": 1.0, "param_norm": 1.0}
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        error = metrics.not_finite(3, values, np.zeros(2), mirror=Mirror(tmp_path), checkpoints=checkpoints)
    assert " mixer nan" in str(error)
