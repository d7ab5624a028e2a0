"""A mixer by itself, as an nnx module, and a class of one's own under a name."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import seqjax
from seqjax import mixers
from seqjax.config import from_config_dict
from seqjax.errors import UserError
from seqjax.mixers import _registry, base
from seqjax.mixers._standalone import CLASSES
from seqjax.models import Model
from seqjax.presets import get_config
from tests import support

SETTINGS = {"heads": 4, "chunk_size": 8}
OWN = {"Mamba2": {"head_dim": 16, "state": 8}, "RWKV5": {"head_dim": 8}, "RWKV6": {"head_dim": 8}}
QUICK = ("Mamba2", "RWKV7", "Top1Chunk", "TransformerPP")


def settings(name):
    return {k: v for k, v in SETTINGS.items() if k in support.fields(CLASSES[name])} | OWN.get(name, {})


def made(name, **more):
    return getattr(seqjax.mixers, name)(dim=32, rngs=nnx.Rngs(0), **settings(name) | more)


def test_every_shipped_mixer_has_a_class_and_editors_see_it():
    assert sorted(CLASSES.values()) == mixers.names()
    assert set(CLASSES) <= set(mixers.__all__)
    assert set(CLASSES) <= set(dir(mixers))
    with pytest.raises(AttributeError, match="Mamba3"):
        mixers.Mamba3  # noqa: B018 - the access is the test


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(CLASSES)]
)
def test_a_mixer_by_itself_under_nnx_jit_and_nnx_grad(name):
    """nnx and `jax.jit` give the same outputs, and every parameter that the output depends on its gradient."""
    mixer = made(name)
    state = nnx.state(mixer)
    nnx.update(mixer, jax.tree.map(lambda x: x + 0.1, state))  # some outputs start at zero
    x_BTD = jax.random.normal(jax.random.key(1), (2, 11, 32))
    y_BTD = nnx.jit(lambda m, x: m(x))(mixer, x_BTD)
    assert (y_BTD.shape, y_BTD.dtype) == (x_BTD.shape, x_BTD.dtype)
    np.testing.assert_allclose(jax.jit(mixer)(x_BTD), y_BTD, rtol=1e-5, atol=1e-5)

    grads = nnx.jit(nnx.grad(lambda m, x: jnp.sum(m(x) ** 2)))(mixer, x_BTD)
    unused = "v_lora" if name.startswith("RWKV7") else None  # the first layer has no earlier one
    flat = nnx.to_flat_state(nnx.state(grads) if isinstance(grads, nnx.Module) else grads)
    assert len(flat) == len(jax.tree.leaves(state))
    for path, grad in flat:
        assert np.isfinite(grad[...]).all(), path
        assert (np.abs(grad[...]).max() > 0) == (path[0] != unused), path


def test_it_is_the_mixer_of_its_file():
    mixer = made("Top1Chunk", n_layers=3, max_len=64)
    assert isinstance(mixer, mixers.load("top1_chunk").Mixer)
    assert type(mixer) is mixers.Top1Chunk is mixers.standalone("top1_chunk")
    assert (mixer.config.heads, mixer.config.chunk_size) == (4, 8)
    with pytest.raises(UserError, match="chunk_size=8 does not fit max_len=4"):
        made("Top1Chunk", max_len=4)


def test_help_lists_the_settings():
    shown = inspect.signature(mixers.Top1Chunk).parameters
    assert list(shown)[:4] == ["dim", "rngs", "n_layers", "max_len"]
    assert set(shown) - {"dim", "rngs", "n_layers", "max_len"} == support.fields("top1_chunk") - {"name"}
    assert shown["chunk_size"].default == 128
    assert shown["heads"].default is inspect.Parameter.empty
    assert "chunk_size=128" in (mixers.Top1Chunk.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "wrong", "match"),
    [
        (
            "Top1Chunk",
            {"heads": 5},
            "^Top1Chunk: heads=5 does not divide dim=32; choose heads that do, or set head_dim",
        ),
        ("RWKV7", {"heads": 5}, "^RWKV7: heads=5 does not divide dim=32"),
        ("DeltaNet", {"heads": 5}, "^DeltaNet: heads=5 does not divide"),
        ("RWKV6", {"head_dim": 5}, "^RWKV6: head_dim=5 must divide dim=32"),
        ("Mamba2", {"head_dim": 5}, "^Mamba2: head_dim=5 does not divide the inner width 64"),
        ("Mamba2", {"stat": 5}, "^Mamba2: stat is not a setting. Did you mean 'state'. Known: chunk_size, conv, "),
        ("Mamba2", {"name": "mamba2"}, "^Mamba2: name is not a setting"),
        ("Mamba2", {"state": "5"}, "^Mamba2: state must be int, not str '5'"),
        ("Mamba2", {"decay": "on"}, "^Mamba2: decay='on' is not known. Did you mean 'one'"),
        ("Mamba2", {"dim": 0}, "^Mamba2: dim must be at least 1, not 0"),
    ],
)
def test_a_wrong_setting_is_named_in_the_words_of_the_call(name, wrong, match):
    arguments = {"dim": 32} | settings(name) | wrong
    with pytest.raises(UserError, match=match):
        getattr(mixers, name)(rngs=nnx.Rngs(0), **arguments)


def test_a_setting_without_default_is_asked_for():
    with pytest.raises(UserError, match=r"^Top1Chunk: heads is missing"):
        mixers.Top1Chunk(dim=32, rngs=nnx.Rngs(0))


# --------------------------------------------------------------------------------------------------- registered classes
class Scaled(base.Mixer):
    """Sums of the past, scaled."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        name: str
        scale: float = 0.5

    def __init__(self, config, spec, *, rngs):
        self.scale = config.scale

    def __call__(self, x_BTD):
        return self.scale * jnp.cumsum(x_BTD, axis=1)

    def init_cache(self, batch, max_len, dtype):
        raise NotImplementedError

    def step(self, x_BD, cache):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(_registry, "_registered", {})


def test_a_registered_class_is_selected_by_its_name():
    assert mixers.register("scaled")(Scaled) is Scaled
    config = from_config_dict(get_config("debug", name="mine", mixer={"name": "scaled", "scale": 2}))
    assert config.model.mixer == Scaled.Config(name="scaled", scale=2.0)
    assert isinstance(Model(config.model, max_len=8).abstract_blocks()[0].mixer, Scaled)
    assert mixers.definition_of(Scaled) == mixers.load("scaled")
    np.testing.assert_array_equal(mixers.standalone("scaled")(dim=3, rngs=nnx.Rngs(0))(jnp.ones((1, 2, 3)))[0, 1], 1.0)
    # a file's config with another mixer by name: its old mixer's settings do not stay
    named = from_config_dict(get_config("debug,model.mixer.name=scaled", name="t", mixer={"name": "transformer_pp"}))
    assert named.model.mixer == Scaled.Config(name="scaled")


def test_a_cell_that_runs_again_replaces_the_class():
    again = type("Scaled", (Scaled,), {})
    mixers.register("scaled")(Scaled)
    mixers.register("scaled")(again)
    assert mixers.load("scaled").Mixer is again
    with pytest.raises(UserError, match=r"Scaled has no name.*register"):
        mixers.definition_of(Scaled)


def test_what_cannot_be_registered_says_why():
    with pytest.raises(UserError, match="'mamba2', which belongs to a mixer that ships"):
        mixers.register("mamba2")
    with pytest.raises(UserError, match=r"'my\.mixer', which is not a Python identifier"):
        mixers.register("my.mixer")
    with pytest.raises(UserError, match=r"must derive from seqjax\.mixers\.base\.Mixer"):
        mixers.register("mine")(object)
    with pytest.raises(
        UserError, match="give it a class Config of its own, inside, a frozen dataclass with `name: str`"
    ):
        mixers.register("mine")(type("Bare", (Scaled,), {"Config": None}))
    assert mixers.known() == mixers.names()


@pytest.mark.parametrize(
    ("name", "match"), [("scald", "Did you mean 'scaled'"), (".os", "not the name of a Python module")]
)
def test_an_unknown_name_suggests_the_registered_one(name, match):
    mixers.register("scaled")(Scaled)
    with pytest.raises(UserError, match=match):
        mixers.load(name)
