"""The mixer contract: required methods, defaults and input checks.

Blocks also receive their layer index.
"""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.config import from_config_dict
from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.models import Model
from tests import support
from tests.mixers import layer_probe

PROBE = "tests.mixers.layer_probe"


class Doubling(base.Mixer):
    """Define only the three methods that every mixer needs."""

    def __call__(self, x_BTD):
        return jnp.cumsum(x_BTD, axis=1)

    def init_cache(self, batch, max_len, dtype):
        return layer_probe.Seen(jnp.zeros((batch, 4), dtype))

    def step(self, x_BD, cache):
        total_BD = cache.layer + x_BD
        return total_BD, layer_probe.Seen(total_BD)


@pytest.mark.parametrize("method", ["__call__", "init_cache", "step"])
def test_a_mixer_without_a_required_method_is_refused(method):
    members = {name: getattr(Doubling, name) for name in ("__call__", "init_cache", "step") if name != method}
    with pytest.raises(TypeError, match=method):
        type("Incomplete", (base.Mixer,), members)()


def test_optional_methods_have_defaults():
    mixer, x_BTD = Doubling(), jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 4), np.float32))
    y_BTD, cache = mixer.prefill(x_BTD, mixer.init_cache(2, 5, jnp.float32))
    np.testing.assert_allclose(y_BTD, mixer(x_BTD), rtol=1e-6)
    np.testing.assert_allclose(cache.layer, y_BTD[:, -1], rtol=1e-6)
    assert mixer.state_size(100) == 4
    assert (mixer.flops_per_token(7), mixer.train_flops_per_token(7), mixer.longest) == (0, 0, 0)
    assert mixer.entropy(x_BTD) is None
    assert mixer.queries_and_keys(x_BTD) is None


class Summing(layer_probe.Block):
    """A block with a state and a carry that defines no `prefill_next`."""

    def __init__(self):
        pass

    def step(self, x_BD, carry, cache, *, layer, dtype):
        total_BD = cache.layer + x_BD * carry["factor"]
        return total_BD + layer, {"factor": carry["factor"] + 1}, layer_probe.Seen(total_BD)


def test_default_prefill_next_runs_step():
    rng = np.random.default_rng(0)
    x_BTD, factor_BTD, start_BD = (rng.standard_normal(shape, np.float32) for shape in ((2, 5, 3), (2, 5, 3), (2, 3)))
    y_BTD, carry, cache = Summing().prefill_next(
        jnp.asarray(x_BTD),
        {"factor": jnp.asarray(factor_BTD)},
        layer_probe.Seen(jnp.asarray(start_BD)),
        layer=jnp.int32(7),
        dtype=jnp.float32,
    )
    total_BTD = start_BD[:, None] + np.cumsum(x_BTD * factor_BTD, axis=1)
    np.testing.assert_allclose(y_BTD, total_BTD + 7, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(carry["factor"], factor_BTD + 1)
    np.testing.assert_allclose(cache.layer, total_BTD[:, -1], rtol=1e-5, atol=1e-5)


def test_training_costs_three_times_the_forward():
    class Counting(Doubling):
        def flops_per_token(self, seq_len):
            return seq_len + 1.0

    assert Counting().train_flops_per_token(9) == 30.0


def test_every_shipped_mixer_derives_from_mixer():
    assert "base" not in mixers.names()
    for name in mixers.names():
        assert issubclass(mixers.load(name), base.Mixer), name


def test_modules_need_exactly_one_mixer_class(monkeypatch):
    own = layer_probe.LayerProbe
    monkeypatch.setattr(layer_probe, "LayerProbe", object)
    with pytest.raises(UserError, match=rf"{PROBE}.*seqjax\.mixers\.base\.Mixer.*none"):
        mixers.load(PROBE)
    several = {"LayerProbe": own, "Second": type("Second", (own,), {"__module__": PROBE})}
    for name, mixer in several.items():
        monkeypatch.setattr(layer_probe, name, mixer, raising=False)
    with pytest.raises(UserError, match=rf"{PROBE}.*LayerProbe, Second"):
        mixers.load(PROBE)


def probe_model(*, scan: bool, pattern: bool) -> Model:
    config = importlib.import_module("configs.transformer_pp").get_config("debug")
    with config.ignore_type():
        if pattern:  # two entries: a group then contains several layers
            config.model.mixer = ({"name": PROBE}, {"name": PROBE})
        else:
            config.model.mixer = {"name": PROBE}
        config.update_from_flattened_dict({"model.n_layers": 4, "model.dim": 8, "model.scan_layers": scan})
    return Model(from_config_dict(config).model, max_len=6)


@pytest.mark.parametrize("pattern", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_blocks_receive_their_layer_index(scan, pattern):
    """Each block receives its layer index, and four layers compute 2 x + layer + 1.

    The test covers training, prefill and step, under scan and in a loop.
    """
    model = probe_model(scan=scan, pattern=pattern)
    params, tokens = jax.jit(model.init)(jax.random.key(0)), support.random_tokens((2, 3))
    x_BTD = np.asarray(params["embed"])[tokens]
    for layer in range(4):
        x_BTD = 2 * x_BTD + layer + 1
    h_BTD = x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + 1e-5)
    want = h_BTD @ np.asarray(params["embed"]).T
    np.testing.assert_allclose(jax.jit(model.logits)(params, tokens), want, rtol=1e-4, atol=1e-5)
    logits, cache = jax.jit(model.prefill)(params, tokens[:, :2], model.init_cache(2, 6))
    np.testing.assert_allclose(logits, want[:, 1], rtol=1e-4, atol=1e-5)
    seen = [int(of_layer.layer) for group in cache for of_layer in group.values()]
    np.testing.assert_array_equal(seen, np.arange(4))
    logits, _ = jax.jit(model.step)(params, tokens[:, 2], jnp.asarray(2), cache)
    np.testing.assert_allclose(logits, want[:, 2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["transformer_pp", "mamba2", "gated_deltanet", "rwkv7"])
@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        ((3, 64), "float32", ValueError),
        ((1, 3, 32), "float32", ValueError),
        ((1, 2, 3, 64), "float32", ValueError),
        ((1, 3, 64), "int32", TypeError),
    ],
)
def test_wrong_input_shape_or_dtype_is_named_in_one_line(name, shape, dtype, error):
    cls = mixers.load(name)
    settings = {"heads": 2} if "heads" in base.settings_of(cls.__init__) else {}
    mixer, x = cls(64, **settings, rngs=nnx.Rngs(0)), jnp.ones(shape, dtype)
    expected = dtype if error is TypeError else re.escape(str(shape))
    for form in (mixer, lambda x: mixer.prefill(x, mixer.init_cache(1, 3, jnp.float32))):
        with pytest.raises(error, match=rf"^x_BTD [^\n]*{expected}[^\n]*$"):
            form(x)
    with pytest.raises(ValueError, match=r"^x_BD [^\n]*\(1, 3, 64\)[^\n]*64[^\n]*$"):
        mixer.step(jnp.ones((1, 3, 64)), mixer.init_cache(1, 3, jnp.float32))


def test_an_input_of_a_users_mixer_is_checked_too():
    for x in ([[[1.0]]], None):
        with pytest.raises(TypeError, match=rf"^x_BTD is {type(x).__name__} [^\n]*$"):
            Doubling()(x)
    with pytest.raises(ValueError, match=r"^x_BTD [^\n]*\(2, 4\)"):
        Doubling()(x_BTD=jnp.ones((2, 4)))
    assert Doubling()(np.ones((1, 2, 4), np.float32)).shape == (1, 2, 4)
