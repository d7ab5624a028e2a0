"""Learning-rate schedules, clipping, Adam, weight decay and gradient accumulation; Muon is in test_muon.py."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from seqjax.config import OptimConfig, from_config_dict, presets
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.nn import constant, param
from seqjax.nn.params import Template, names
from seqjax.training.schedule import Segment, optimizer, rates
from seqjax.training.step import init_state, make_train_step
from tests import support


@pytest.mark.parametrize(("warmup", "steps", "final"), [(10, 100, 0.0), (10, 100, 1e-4), (1, 7, 0.0), (0, 7, 0.0)])
def test_linear_decay_endpoints(warmup, steps, final):
    optim, steps_taken = OptimConfig(lr=1e-3, warmup_steps=warmup, final_lr=final), np.arange(steps) + 1
    values = rates(optim, Segment(0, steps, is_end=True), steps_taken)
    peak = max(1, warmup) - 1
    assert values[0] == pytest.approx(1e-3 / max(1, warmup), rel=1e-5)
    assert values[peak] == pytest.approx(1e-3, rel=1e-5)
    assert values.argmax() == peak
    progress = (np.arange(peak, steps) - peak) / (steps - peak)  # the step after the last one would have `final`
    np.testing.assert_allclose(values[peak:], 1e-3 + (final - 1e-3) * progress, rtol=1e-4)
    assert (np.diff(values[: peak + 1]) > 0).all()
    assert (np.diff(values[peak:]) < 0).all()
    assert (values[peak:] > final).all() and (values > 0).all(), "each step learns"


def test_cosine_decay():
    """Warmup and the rate at half of the decay equal the linear schedule's."""
    optim, steps = OptimConfig(lr=1e-3, warmup_steps=10, final_lr=1e-4, schedule="cosine"), np.arange(109) + 1
    segment = Segment(0, 109, is_end=True)
    values = rates(optim, segment, steps)
    linear = rates(dataclasses.replace(optim, schedule="linear"), segment, steps)
    np.testing.assert_array_equal(values[:10], linear[:10])
    angles = np.pi * np.arange(100) / 100
    np.testing.assert_allclose(values[9:], 1e-4 + 9e-4 * (1 + np.cos(angles)) / 2, rtol=1e-6)
    assert values[59] == pytest.approx(linear[59]) and (values[10:59] > linear[10:59]).all()


def test_warmup_longer_than_the_run_only_rises():
    values = list(rates(OptimConfig(lr=1e-3, warmup_steps=2500), Segment(0, 20, is_end=True), np.arange(20) + 1))
    assert values == sorted(values)
    assert values[-1] == pytest.approx(1e-3, rel=1e-5)


def test_single_rate_of_the_longest_run_is_cheap():
    steps, optim = 2**31 - 1, OptimConfig(lr=1.0, warmup_steps=1)  # the rates of all steps would take 8 GB
    last = rates(optim, Segment(0, steps, is_end=True), np.array(steps))
    assert last.shape == ()
    assert last == pytest.approx(1 / steps, rel=1e-6)


def updates(config, grads, params, steps=1, groups=None):
    """Return the parameter update of the last of `steps` steps, at learning rate 1."""
    transform = optimizer(config, groups)
    state = transform.init(params)
    for _ in range(steps):
        change, state = transform.update(grads, state, params)
    return change


PLAIN = OptimConfig()
TREE = {
    "embed": jnp.ones((4, 3)),
    "norm": {"g": jnp.ones(3)},
    "blocks": {"w": jnp.ones((2, 3, 3)), "g": jnp.ones((2, 3))},
}


def test_adam_matches_the_equations():
    """The first step is g / |g| after bias correction; the second is computed by hand."""
    config = dataclasses.replace(PLAIN, clip_norm=None)
    transform = optimizer(config)
    params = {"x": jnp.zeros(2)}
    state = transform.init(params)
    first, state = transform.update({"x": jnp.array([0.5, -2.0])}, state, params)
    np.testing.assert_allclose(first["x"], [-1, 1], rtol=1e-4)
    second, _ = transform.update({"x": jnp.array([1.0, 1.0])}, state, params)
    g1, g2 = np.array([0.5, -2.0]), np.array([1.0, 1.0])
    m = (0.9 * 0.1 * g1 + 0.1 * g2) / (1 - 0.9**2)
    v = (0.95 * 0.05 * g1**2 + 0.05 * g2**2) / (1 - 0.95**2)
    np.testing.assert_allclose(second["x"], -m / (np.sqrt(v) + 1e-8), rtol=1e-4)


@pytest.mark.parametrize(("clip", "scale"), [(1.0, 1.0), (1.0, 100.0), (None, 100.0)])
def test_clipping_bounds_the_global_norm(clip, scale):
    """Adam removes a common factor, so check the first moment."""
    params = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    grads = jax.tree.map(lambda x: scale * jnp.ones_like(x), params)
    transform = optimizer(dataclasses.replace(PLAIN, clip_norm=clip))
    _, state = transform.update(grads, transform.init(params), params)
    moments = [s.mu for s in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")]
    assert len(moments) == 1
    norm = float(optax.tree.norm(moments[0])) / 0.1
    assert norm == pytest.approx(min(clip or np.inf, scale * np.sqrt(7)), rel=1e-5)


def decayed_parameters(params, groups=None):
    """Return for each parameter whether weight decay applies."""
    zeros, config = jax.tree.map(jnp.zeros_like, params), dataclasses.replace(PLAIN, weight_decay=0.1)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(updates(PLAIN, zeros, params, groups=groups)))
    changes = updates(config, zeros, params, groups=groups)

    def is_decayed(change, x):
        if (np.asarray(change) == 0).all():
            return False
        np.testing.assert_allclose(change, -0.1 * x, rtol=1e-5)
        return True

    return jax.tree.map(is_decayed, changes, params)


def test_weight_decay_without_groups_uses_the_number_of_axes():
    """Runs from before groups use this rule. Layers are stacked, so gains in them have two axes."""
    assert decayed_parameters(TREE) == {"embed": True, "norm": {"g": False}, "blocks": {"w": True, "g": False}}


# Config and settings -> group of each array that has several axes per layer and is not a matrix.
NO_MATRICES = {
    "transformer_pp": {"embed": "embedding"},
    "transformer_pp:model.tie_embeddings=False": {"embed": "embedding", "head": "embedding"},
    "transformer_pp:model.canon=ACD": {
        "embed": "embedding",
        "canon_a.w": "convolution",
        "canon_c.w": "convolution",
        "mlp.up_conv.w": "convolution",
        "mlp.gate_conv.w": "convolution",
    },
    "transformer_pp:model.mixer.const=qk": {
        "embed": "embedding",
        "mixer.q.table": "embedding",
        "mixer.k.table": "embedding",
    },
    "transformer": {"embed": "embedding", "positions": "embedding"},
    "mamba1": {"embed": "embedding", "mixer.a_log": "vector", "mixer.conv.w": "convolution"},
    "mamba2": {"embed": "embedding", "mixer.conv_x.w": "convolution", "mixer.conv_bc.w": "convolution"},
    "log_linear_mamba2": {
        "embed": "embedding",
        "mixer.level_scale": "vector",
        "mixer.conv_x.w": "convolution",
        "mixer.conv_bc.w": "convolution",
    },
    "mamba3": {"embed": "embedding", "mixer.b_bias": "vector", "mixer.c_bias": "vector"},
    "rwkv5": {"embed": "embedding", "mixer.mu": "vector"},
    "rwkv6": {"embed": "embedding", "mixer.mu": "vector"},
    "rwkv7": {"embed": "embedding"},
    "kda": {"embed": "embedding"} | {f"mixer.{x}_conv.w": "convolution" for x in "qkv"},
}


@pytest.mark.parametrize("config", NO_MATRICES)
def test_weight_decay_applies_to_matrices(config):
    """Decay follows the groups that the model declares."""
    name, _, settings = config.partition(":")
    text = ",".join(filter(None, (f"{name}:debug,model.n_layers=2", settings)))
    model = Model(from_config_dict(presets.read_config(text)).model, max_len=8)
    shapes, groups = dict(names(model.shapes)), dict(names(model.groups))
    assert groups.keys() == shapes.keys()
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), model.shapes)
    decayed = dict(names(decayed_parameters(params, model.groups)))
    not_matrices = {}
    for path, x in shapes.items():
        stacked = path.startswith("blocks.")
        if x.ndim - stacked < 2:
            assert groups[path] == "vector", path
        elif groups[path] != "matrix":
            not_matrices[path.split(".", 2)[2] if stacked else path] = groups[path]
        assert decayed[path] == (groups[path] == "matrix"), path
    assert not_matrices == NO_MATRICES[config]


class UndeclaredGroups(nnx.Module):
    """A user's mixer with parameters from `param`, Flax layers and `nnx.Param`."""

    def __init__(self, rngs):
        self.projection = param(rngs, constant(0.0), (8, 4), ("embed", None))
        self.stack = param(rngs, constant(0.0), (3, 8, 4), (None, "embed", "mlp"))
        self.rates = param(rngs, constant(0.0), (8, 4), ("mlp", "state"))
        self.taps = param(rngs, constant(0.0), (8, 4), ("mlp", "conv"))
        self.table = param(rngs, constant(0.0), (8, 4), ("positions", None))
        self.gain = param(rngs, constant(0.0), (8,), ("embed",))
        self.bias_HK = param(rngs, constant(0.0), (2, 4), ("heads", None), group="vector")
        self.linear, self.embed = nnx.Linear(8, 4, rngs=rngs), nnx.Embed(8, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs)
        self.bare = nnx.Param(jnp.zeros((8, 4)))


def test_groups_inferred_without_declaration():
    groups = Template(lambda rngs, layer: UndeclaredGroups(rngs)).groups
    attention = groups.pop("attention")
    assert groups == {
        "projection": "matrix",
        "stack": "matrix",
        "rates": "vector",
        "taps": "convolution",
        "table": "embedding",
        "gain": "vector",
        "bias_HK": "vector",
        "linear": {"kernel": "matrix", "bias": "vector"},
        "embed": {"embedding": "embedding"},
        "bare": "matrix",
    }
    assert attention["query"] == {"kernel": "matrix", "bias": "vector"}, "the bias of a Flax attention has two axes"
    wrong: Any = "matrices"  # unwrapped: the tests also check types at run time
    with pytest.raises(UserError, match=r"group='matrices'.* matrix, vector, embedding, convolution"):
        inspect.unwrap(param)(nnx.Rngs(0), constant(0.0), (2, 2), (None, None), group=wrong)


def test_micro_batches_match_the_full_batch():
    model = support.tiny_model("transformer_pp", train__seq_len=9)
    transform = optax.sgd(1.0)  # the update is the gradient
    step = jax.jit(make_train_step(model, transform))
    state = init_state(model, transform, jax.random.key(0))
    state = state._replace(params=support.random_params(model))
    tokens = support.random_tokens((8, 10))
    full, full_metrics = step(state, tokens.reshape(1, 8, 10), 1.0)
    accumulated, accumulated_metrics = step(state, tokens.reshape(4, 2, 10), 1.0)
    assert float(full_metrics["grad_norm"]) > 0.1
    for name in ("loss", "grad_norm"):
        assert float(accumulated_metrics[name]) == pytest.approx(float(full_metrics[name]), rel=1e-5)
    for a, b in zip(jax.tree.leaves(full.params), jax.tree.leaves(accumulated.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert int(full.step) == int(accumulated.step) == 1


def test_sequence_losses_match_the_logits():
    model = support.tiny_model("transformer_pp", train__seq_len=9)
    weights, tokens = support.random_params(model), support.random_tokens((4, 10))
    nats_B = jax.jit(model.sequence_losses)(weights, tokens)
    log_p_BTO = jax.nn.log_softmax(jax.jit(model.logits)(weights, tokens[:, :-1]))
    expected_B = -jnp.take_along_axis(log_p_BTO, tokens[:, 1:, None], axis=-1).sum((1, 2))
    np.testing.assert_allclose(nats_B, expected_B, rtol=1e-5)
    total, count = jax.jit(model.loss)(weights, tokens)
    assert float(count) == 36
    assert float(total) == pytest.approx(float(nats_B.sum()), rel=1e-6)
