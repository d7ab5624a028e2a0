"""A mixer as a standalone nnx module, and registration of user classes."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import seqjax
from seqjax import mixers
from seqjax.config import from_config_dict
from seqjax.config.presets import get_config
from seqjax.errors import UserError
from seqjax.mixers import _registry, base
from seqjax.models import Model
from tests import support

CLASSES = {mixers.load(name).__name__: name for name in mixers.names()}
SETTINGS = {"heads": 4, "chunk_size": 8}
SSM = {"head_dim": 16, "state": 8}
OWN = {"Mamba2": SSM, "Mamba3": SSM, "RWKV5": {"head_dim": 8}, "RWKV6": {"head_dim": 8}}
QUICK = ("Top1Chunk", "TransformerPP")


def settings(name):
    return {k: v for k, v in SETTINGS.items() if k in support.fields(CLASSES[name])} | OWN.get(name, {})


def made(name, **more):
    return getattr(seqjax.mixers, name)(dim=32, rngs=nnx.Rngs(0), **settings(name) | more)


def test_classes_and_file_names_match():
    for name, file in CLASSES.items():
        assert getattr(mixers, name) is mixers.load(file)
        assert mixers.name_of(mixers.load(file)) == file
    assert set(CLASSES) <= set(dir(mixers))
    for name in ("Mamba9", "mamba2x", "MAMBA2"):
        with pytest.raises(AttributeError, match=name):
            getattr(mixers, name)


def test_type_checking_imports_exist():
    """The imports for type checkers exist.

    `TYPE_CHECKING` hides them from Python, so only editors would report a missing name.
    """
    reported = re.findall(
        r"^    from (seqjax\.mixers\.\w+) import (\w+) as \2$", Path(mixers.__file__).read_text(), re.M
    )
    assert len(reported) > 10
    for module, name in reported:
        assert getattr(mixers, name).__module__ == module


EDITED = """from flax import nnx

import seqjax

seqjax.mixers.TransformerPP(dim=8, heads=2, rngs=nnx.Rngs(0))
seqjax.mixers.TransformerPP(dim=8, heads=2, windw=3, rngs=nnx.Rngs(0))
seqjax.mixers.TransformerPP(dim=8, heads=2, rope_scaling="yarn", rngs=nnx.Rngs(0))
"""


@pytest.mark.slow
def test_a_type_checker_reports_wrong_settings_and_values(tmp_path):
    """Check a user's file outside the repository."""
    (tmp_path / "own.py").write_text(EDITED)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(support.ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", f"--pythonpath={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = {d["range"]["start"]["line"]: d["message"] for d in json.loads(done.stdout)["generalDiagnostics"]}
    assert errors.keys() == {5, 6}, done.stdout
    assert 'No parameter named "windw"' in errors[5]
    assert 'parameter "rope_scaling"' in errors[6]


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(CLASSES)]
)
def test_standalone_mixers_under_nnx_jit_and_nnx_grad(name):
    """`nnx.jit` and `jax.jit` give equal outputs.

    Each parameter that affects the output has a nonzero gradient.
    """
    mixer = made(name)
    state = nnx.state(mixer)
    nnx.update(mixer, jax.tree.map(lambda x: x + 0.1, state))  # some outputs start at zero
    x_BTD = jax.random.normal(jax.random.key(1), (2, 11, 32))
    y_BTD = nnx.jit(lambda m, x: m(x))(mixer, x_BTD)
    assert (y_BTD.shape, y_BTD.dtype) == (x_BTD.shape, x_BTD.dtype)
    np.testing.assert_allclose(jax.jit(mixer)(x_BTD), y_BTD, rtol=1e-5, atol=1e-5)

    def objective(m, x):
        y, loss = m.call_with_loss(x) if m.has_loss else (m(x), 0.0)
        return jnp.sum(y**2) + loss

    grads = nnx.jit(nnx.grad(objective))(mixer, x_BTD)
    unused = "v_lora" if name.startswith("RWKV7") else None  # a first layer has no earlier values
    flat = nnx.to_flat_state(nnx.state(grads) if isinstance(grads, nnx.Module) else grads)
    assert len(flat) == len(jax.tree.leaves(state))
    for path, grad in flat:
        assert np.isfinite(grad[...]).all(), path
        assert (np.abs(grad[...]).max() > 0) == (path[0] != unused), path


def test_standalone_and_model_mixers_start_equal():
    """A model's layer equals the constructor's result with the same keys.

    Includes a mixer with initial values that depend on the layer.
    """
    for file in ("top1_chunk", "rwkv6"):
        model = support.tiny_model(file, dict(support.FIRST)[file])
        mixer = model.abstract_blocks()[0].mixer
        assert type(mixer) is mixers.load(file)
        own = {key: value for key, value in dataclasses.asdict(model.config.mixer).items() if key != "name"}
        for index in range(2):
            layer = base.Layer(index, n_layers=2, max_len=model.max_len)
            standalone = mixers.load(file)(model.config.dim, **own, layer=layer, rngs=nnx.Rngs(0))
            described = mixers.build(model.config.mixer, model.config.dim, layer=layer, rngs=nnx.Rngs(0))
            jax.tree.map(np.testing.assert_array_equal, nnx.state(standalone), nnx.state(described))
    with pytest.raises(UserError, match=r"^chunk_size=8 .*max_len=4"):
        made("Top1Chunk", layer=base.Layer(max_len=4))


def test_config_settings_match_the_constructor():
    shown = inspect.signature(mixers.Top1Chunk).parameters
    assert set(shown) - {"dim", "rngs", "layer"} == support.fields("top1_chunk") - {"name"}
    of_config = mixers.settings_class("top1_chunk")(name="top1_chunk", heads=2)
    assert (shown["chunk_size"].default, of_config.chunk_size, of_config.selection) == (128, 128, "exact")
    assert shown["heads"].default is inspect.Parameter.empty


@pytest.mark.parametrize(
    ("name", "wrong", "match"),
    [
        (
            "Top1Chunk",
            {"heads": 5},
            "^heads=5 .*dim=32.*head_dim",
        ),
        ("RWKV7", {"heads": 5}, "^heads=5 .*dim=32"),
        ("DeltaNet", {"heads": 5}, "^heads=5 "),
        ("RWKV6", {"head_dim": 5}, "^head_dim=5 .*dim=32"),
        ("Mamba2", {"head_dim": 5}, "^head_dim=5 .*64"),
        ("Mamba2", {"stat": 5}, "^stat .*Mamba2.*'state'.*chunk_size, conv, "),
        ("Mamba2", {"name": "mamba2"}, "^name .*setting"),
        ("Mamba2", {"state": "5"}, "^state .*int.*'5'"),
        ("Mamba2", {"decay": "on"}, "^decay='on'.*'one'"),
        ("Mamba2", {"dim": 0}, "^dim .*0"),
    ],
)
def test_wrong_settings_are_named_as_in_the_call(name, wrong, match):
    arguments = {"dim": 32} | settings(name) | wrong
    with pytest.raises(UserError, match=match):
        getattr(mixers, name)(rngs=nnx.Rngs(0), **arguments)


def test_missing_required_settings_are_named():
    with pytest.raises(UserError, match=r"^heads .*missing"):
        mixers.Top1Chunk(dim=32, rngs=nnx.Rngs(0))


# --------------------------------------------------------------------------------------------------- registered classes
class Scaled(base.Mixer):
    """A scaled cumulative sum."""

    def __init__(self, dim, *, scale: float = 0.5, rngs):
        self.scale = scale

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
    assert dataclasses.asdict(config.model.mixer) == {"name": "scaled", "scale": 2.0}
    assert isinstance(Model(config.model, max_len=8).abstract_blocks()[0].mixer, Scaled)
    assert (mixers.name_of(Scaled), mixers.load("scaled")) == ("scaled", Scaled)
    np.testing.assert_array_equal(Scaled(dim=3, scale=1, rngs=nnx.Rngs(0))(jnp.ones((1, 2, 3)))[0, 1], 2.0)
    # Naming another mixer drops the settings of the config file's mixer.
    named = from_config_dict(get_config("debug,model.mixer.name=scaled", name="t", mixer={"name": "transformer_pp"}))
    assert dataclasses.asdict(named.model.mixer) == {"name": "scaled", "scale": 0.5}


def test_a_cell_that_runs_again_replaces_the_class():
    again = type("Scaled", (Scaled,), {})
    mixers.register("scaled")(Scaled)
    mixers.register("scaled")(again)
    assert mixers.load("scaled") is again
    with pytest.raises(UserError, match=r"Unnamed.*register"):
        mixers.name_of(type("Unnamed", (Scaled,), {}))


def test_register_refuses_invalid_names_and_classes():
    with pytest.raises(UserError, match=r"'mamba2'.*ships"):
        mixers.register("mamba2")
    with pytest.raises(UserError, match=r"'my\.mixer'.*identifier"):
        mixers.register("my.mixer")
    with pytest.raises(UserError, match=r"seqjax\.mixers\.base\.Mixer"):
        mixers.register("mine")(object)

    def without_rngs(self, dim):
        pass

    def with_a_name(self, dim, *, name, rngs):
        pass

    for init in (without_rngs, with_a_name):
        with pytest.raises(UserError, match=r"`def __init__\(self, dim, \*, SETTINGS, rngs\)`"):
            mixers.register("mine")(type("Odd", (Scaled,), {"__init__": init}))
    assert mixers.known() == mixers.names()


@pytest.mark.parametrize(("name", "match"), [("scald", "'scaled'"), (".os", "'\\.os'")])
def test_an_unknown_name_suggests_the_registered_one(name, match):
    mixers.register("scaled")(Scaled)
    with pytest.raises(UserError, match=match):
        mixers.load(name)
