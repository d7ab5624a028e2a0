"""XLA's CPU programs are correct with the flag in kernels_pallas/cpu_compiler.py."""

import contextlib
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cpu_compiler
from seqjax.command_line import run_command
from seqjax.config import from_config_dict, presets
from seqjax.errors import UserError
from seqjax.training.loop import train


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_with_one_number_then_a_sum(dtype) -> None:
    x = jax.random.normal(jax.random.key(0), (4, 128, 128), dtype)
    y = jax.random.normal(jax.random.key(1), (4, 128, 128))

    @jax.jit
    def f(x, y):
        return (jnp.einsum("bij,bjk->bik", x, jnp.ones_like(x), preferred_element_type=jnp.float32) * y).sum(-1)

    want = np.asarray(x, np.float64).sum(-1) * np.asarray(y, np.float64).sum(-1)
    np.testing.assert_allclose(f(x, y), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_sums_of_squares_of_small_products() -> None:
    n = 32_769
    x = jnp.stack([jnp.arange(n, dtype=jnp.float32)] + 2 * [jnp.zeros(n)], axis=1)
    squares = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(x)
    np.testing.assert_array_equal(squares, np.arange(n, dtype=np.float32) ** 2)


@pytest.mark.parametrize("flags", ["", "--a=b", f"{cpu_compiler.FLAG}="])
@pytest.mark.parametrize("version", [(0, 10, 1), (0, 10, 2), (0, 12, 9), (0, 13, 0)], ids=str)
@pytest.mark.parametrize("tpu", [None, "libtpu is installed"])
def test_existing_flags_are_kept(monkeypatch, flags, version, tpu) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(cpu_compiler, "has_started", lambda: False)
    monkeypatch.setattr(cpu_compiler.jax, "__version_info__", version)
    monkeypatch.setattr(cpu_compiler.importlib.util, "find_spec", lambda name: tpu)
    for _ in range(2):
        cpu_compiler.use_safe_fusions()
    assert os.environ["XLA_FLAGS"].startswith(flags)
    is_set = not tpu and (0, 10, 2) <= version < (0, 13)
    assert os.environ["XLA_FLAGS"].count(cpu_compiler.FLAG) == (cpu_compiler.FLAG in flags or is_set)


def test_a_late_call_warns(monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(cpu_compiler, "has_started", lambda: True)
    monkeypatch.setattr(cpu_compiler.importlib.util, "find_spec", lambda name: None)
    if jax.default_backend() != "cpu":
        cpu_compiler.use_safe_fusions()
        return
    with pytest.warns(UserWarning, match=cpu_compiler.SAFE):
        cpu_compiler.use_safe_fusions()
    assert os.environ["XLA_FLAGS"] == "", "children would inherit it"


def test_commands_set_the_flag(monkeypatch) -> None:
    """Each command calls `run_command` before it starts JAX."""
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(cpu_compiler, "has_started", lambda: False)
    monkeypatch.setattr(cpu_compiler.importlib.util, "find_spec", lambda name: None)
    seen = []
    run_command(lambda argv: seen.append(os.environ["XLA_FLAGS"]), [])
    assert seen == [cpu_compiler.SAFE]


@pytest.mark.parametrize("has_started", [False, True])
def test_train_from_python_sets_the_flag_or_warns(monkeypatch, tmp_path, has_started) -> None:
    """Training in a notebook sets the flag as commands do.

    So do `seqjax.load` and `check_mixer`.
    """
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(cpu_compiler, "has_started", lambda: has_started)
    monkeypatch.setattr(cpu_compiler.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    config = presets.read_config("transformer_pp:debug", [("data.corpus", "blocks"), ("data.path", "nowhere")])
    warns = pytest.warns(UserWarning, match=cpu_compiler.SAFE) if has_started else contextlib.nullcontext()
    with warns, pytest.raises(UserError):
        train(from_config_dict(config), tmp_path / "run")
    assert os.environ["XLA_FLAGS"] == ("" if has_started else cpu_compiler.SAFE)


FIRST_USE = """
import os, jax
from kernels_pallas import cpu_compiler
import seqjax
assert not os.environ["XLA_FLAGS"], "importing changes nothing"
from seqjax import mixers
from flax import nnx
assert not cpu_compiler.has_started()
mixers.Mamba2(8, rngs=nnx.Rngs(0), head_dim=8)
assert cpu_compiler.has_started()
cpu_compiler.use_safe_fusions()
print(os.environ["XLA_FLAGS"])
"""


def test_first_use_sets_the_flag_after_importing_jax() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", FIRST_USE],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    is_affected = cpu_compiler.AFFECTED[0] <= jax.__version_info__ < cpu_compiler.AFFECTED[1]
    is_set = is_affected and importlib.util.find_spec("libtpu") is None
    assert done.stdout.strip() == (cpu_compiler.SAFE if is_set else "")


# With one chunk, the initial state and the final gradient are zeros that XLA could treat as constants.
WITHOUT_THE_FLAG = """
import sys
import jax, numpy as np
from seqjax.config import from_config_dict, presets
from seqjax.models import Model
config = presets.read_config(sys.argv[1] + ":debug")
config.model.n_layers, config.model.dtype = 2, "bfloat16"
model = Model(from_config_dict(config).model, max_len=64)
params = jax.jit(model.init)(jax.random.key(0))
tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (4, 65), np.int32)
grads = jax.jit(jax.grad(lambda params: model.loss(params, tokens)[0]))(params)
leaves = [np.asarray(x, np.float32) for x in jax.tree.leaves(grads)]
assert all(np.isfinite(x).all() for x in leaves) and any(x.any() for x in leaves)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["rwkv6", "mamba2", "rwkv5"])
def test_bfloat16_gradients_of_one_chunk_without_the_flag(mixer) -> None:
    """With a constant state, these gradients and rwkv6's logits were NaN."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT_THE_FLAG, mixer]
    done = subprocess.run(
        command,
        env=env | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
