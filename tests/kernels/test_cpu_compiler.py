"""XLA on a CPU gets what it compiles right, with the flag of kernels_pallas/cpu_compiler.py."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import drift
from kernels_pallas import cpu_compiler


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


@pytest.mark.parametrize("mixer", ["mamba2", "rwkv5", "rwkv6"])
def test_bfloat16_gradients_of_one_chunk(mixer) -> None:
    """The states before the only chunk are zeros that XLA knows of."""
    result = drift.measure(mixer, seq_len=64)
    assert math.isfinite(result["gradients"]) and 0 < result["gradients"] < result["gradients_bound"], result


@pytest.mark.parametrize("given", ["", "--a=b", f"{cpu_compiler.FLAG}="])
@pytest.mark.parametrize("tpu", [None, "libtpu is installed"])
def test_a_flag_that_was_given_stays(monkeypatch, given, tpu) -> None:
    monkeypatch.setenv("XLA_FLAGS", given)
    monkeypatch.setattr(cpu_compiler, "_has_started", lambda: False)
    monkeypatch.setattr(cpu_compiler.importlib.util, "find_spec", lambda name: tpu)
    for _ in range(2):
        cpu_compiler.use_safe_fusions()
    assert os.environ["XLA_FLAGS"].startswith(given)
    assert os.environ["XLA_FLAGS"].count(cpu_compiler.FLAG) == (cpu_compiler.FLAG in given or not tpu)


@pytest.mark.parametrize(("before", "warned"), [("import jax", False), ("import jax; jax.devices()", True)])
def test_an_import_that_comes_too_late_is_told(before, warned) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    program = f"{before}; import kernels_pallas"
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert ("JAX had started before seqjax" in result.stderr) == warned, result.stderr
    assert (cpu_compiler.SAFE in result.stderr) == warned
