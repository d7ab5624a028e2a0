"""Log-linear attention, `log_linear`: both backends against double precision.

Gradients are compared as well.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import backend
from kernels_pallas.log_linear import reference
from kernels_pallas.log_linear.triton import refusal
from kernels_pallas.triton import runtime
from tests import support
from tests.kernels.common import assert_close, fast_jit

NAMES = ("y", "dx", "dlog_a", "db", "dc", "dm")


def draw(B, T, H, V, N, L, *, decay=0.3, dtype="float32", seed=0) -> list[jax.Array]:
    """Draw x, log_a, b, c and m."""
    rng = np.random.default_rng(seed)
    x, log_a, b, c = (rng.normal(size=shape) for shape in ((B, T, H, V), (B, T, H), (B, T, N), (B, T, N)))
    log_a, m = (jnp.asarray(t, jnp.float32) for t in (-decay * np.exp(log_a), rng.uniform(0, 2, (B, T, H, L))))
    x, b, c = (jnp.asarray(t, dtype) for t in (x, b, c))
    return [x, jnp.maximum(log_a, -59), b, c, m]


def op(*arrays, chunk=16, implementation=None):
    return kp.log_linear(*arrays, chunk_size=chunk, implementation=implementation)


def with_gradients(f: Any, arrays: Any, *, wide: bool = False) -> list[np.ndarray]:
    """Return f(*arrays) and its gradients, for a fixed random cotangent; in float64 if `wide`."""
    dy = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape), arrays[0].dtype)

    def run(dy, *arrays):
        y, pull = jax.vjp(f, *arrays)
        return y, *pull(dy)

    with jax.enable_x64(wide):
        if wide:
            dy, *arrays = (jnp.asarray(x, jnp.float64) for x in (dy, *arrays))
        return [np.asarray(x) for x in fast_jit(run)(dy, *arrays)]


def assert_all_close(got: Any, want: Any, dtype: str) -> None:
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert_close(g, w, dtype, name)


# B, T, H, V, N, L; chunk; decay. Chunk numbers with every bit, numbers of chunks that are not powers of two, partial
# chunks, fewer levels than bits, more levels than positions, and shapes above one tile
CASES = [
    ((1, 52, 3, 5, 20, 8), 16, 0.3),
    ((1, 37, 2, 20, 6, 3), 16, 5.0),
    ((2, 150, 3, 20, 20, 9), 16, 0.1),
    ((2, 75, 2, 5, 20, 8), 16, 0.3),
    ((1, 130, 2, 8, 4, 4), 16, 0.02),
    ((1, 64, 2, 8, 4, 12), 32, 0.01),
    ((1, 16, 2, 8, 4, 2), 64, 0.3),
    ((1, 3, 1, 8, 4, 5), 16, 0.3),
    ((1, 530, 1, 4, 17, 12), 16, 0.01),
]


@cache  # shared by both implementations
def wanted(shape: tuple[int, ...], decay: float) -> Any:
    return with_gradients(reference.log_linear, draw(*shape, decay=decay), wide=True)


@pytest.mark.parametrize(
    ("shape", "chunk", "decay"), support.slow_unless(lambda *case: case in CASES[:2], CASES), ids=str
)
def test_equals_the_sum_over_pairs(implementation, shape, chunk, decay) -> None:
    got = with_gradients(partial(op, chunk=chunk, implementation=implementation), draw(*shape, decay=decay))
    assert_all_close(got, wanted(shape, decay), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bit_inputs_round_operands_only(implementation, dtype) -> None:
    arrays = draw(2, 75, 3, 8, 20, 8, decay=0.1, dtype=dtype)
    got = with_gradients(partial(op, implementation=implementation), arrays)
    assert [x.dtype for x in got] == [dtype, *(x.dtype for x in arrays)]
    assert_all_close(got, with_gradients(reference.log_linear, arrays, wide=True), dtype)


def test_is_causal_and_deterministic(implementation) -> None:
    arrays = draw(1, 50, 3, 6, 4, 7)
    run = partial(op, implementation=implementation)
    first, again = with_gradients(run, arrays), with_gradients(run, arrays)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    changed = [x.at[:, 29:].multiply(2) for x in arrays]
    np.testing.assert_array_equal(with_gradients(run, changed)[0][:, :29], first[0][:, :29])


@pytest.mark.slow
def test_chunk_size_changes_nothing(implementation) -> None:
    arrays = draw(1, 200, 2, 6, 4, 9)
    want = with_gradients(partial(op, chunk=16, implementation=implementation), arrays)
    for chunk in (5, 48, 300):  # triton takes 16 to 32
        got = with_gradients(partial(op, chunk=chunk, implementation=implementation), arrays)
        assert_all_close(got, want, "float32")


@pytest.mark.slow
def test_under_vmap_and_checkpoint_equals_a_loop(implementation) -> None:
    each = [draw(1, 37, 2, 4, 4, 5, seed=seed) for seed in range(2)]
    run = partial(op, implementation=implementation)
    stacked = [jnp.stack(x) for x in zip(*each, strict=True)]
    assert_close(fast_jit(jax.vmap(run))(*stacked), np.stack([with_gradients(run, x)[0] for x in each]), "float32")
    assert_all_close(with_gradients(jax.checkpoint(run), each[0]), with_gradients(run, each[0]), "float32")
    grad = jax.grad(lambda *a: run(*a).sum(), argnums=1)
    assert_close(fast_jit(jax.vmap(grad))(*stacked)[1], fast_jit(grad)(*each[1]), "float32")


def problem(*, dtype="bfloat16", V=64, N=128, L=12, chunk=64, wide="float32", is_named=False) -> backend.Problem:
    sizes = [((1, 80, 2, V), dtype), ((1, 80, 2), wide), *[((1, 80, N), dtype)] * 2, ((1, 80, 2, L), wide)]
    operands = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in sizes)
    return backend.Problem("gpu", operands, {"chunk_size": chunk}, is_named)


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(dtype="float32", V=5, N=3, L=2)) is None
    assert "head dim 160 or state 128 is larger than 128" in str(refusal(problem(V=160)))
    assert "head dim 64 or state 256 is larger than 128" in str(refusal(problem(N=256)))
    assert "at least two levels" in str(refusal(problem(L=1)))
    assert "8 positions per chunk are less than" in str(refusal(problem(chunk=8)))
    assert refusal(problem(chunk=8, is_named=True)) is None
    assert "decays and level weights are bfloat16" in str(refusal(problem(wide="bfloat16")))
    with jax.enable_x64(True):
        assert "x, b and c are float64" in str(refusal(problem(dtype="float64", wide="float64")))


def test_double_precision_uses_xla() -> None:
    with jax.enable_x64(True):
        arrays = [t.astype(jnp.float64) for t in draw(1, 20, 1, 4, 4, 5)]
        got = with_gradients(op, arrays, wide=True)
        assert_all_close(got, with_gradients(reference.log_linear, arrays, wide=True), "float64")
    assert kp.backends_used()["log_linear"] == "xla"
