"""Cross-entropy of logits: both backends against double precision.

The tests also cover refusals of the Triton kernel.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import backend
from kernels_pallas.cross_entropy import reference
from kernels_pallas.cross_entropy.triton import refusal
from kernels_pallas.triton import runtime
from seqjax.ops import cross_entropy as chunked
from tests import extras
from tests.kernels.common import fast_jit

loss = extras.triton_module("cross_entropy.triton.loss")

EPS = 2.0**-24  # half an ulp of float32 at 1
# Rounding error per dtype: relative, and absolute for subnormal numbers.
ROUNDING = {"float32": (EPS, 0.0), "bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25)}


def draw(n_vocab: int, scale: float, shape=(2, 3), seed=0) -> tuple[jax.Array, ...]:
    """Draw logits, targets and weights; some weights are 0."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(scale * rng.normal(size=(*shape, n_vocab)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, n_vocab, shape), jnp.int32)
    return logits, targets, jnp.asarray(rng.uniform(0.1, 2, shape) * (rng.random(shape) < 0.7), jnp.float32)


def op(*arrays, dtype="float32", implementation=None):
    return fast_jit(partial(kp.cross_entropy, dtype=jnp.dtype(dtype), implementation=implementation))(*arrays)


def wanted(logits, targets, weights) -> tuple[np.ndarray, np.ndarray]:
    with jax.enable_x64(True):
        losses, g = reference.cross_entropy(jnp.float64(logits), targets, jnp.float64(weights))
        return np.asarray(losses), np.asarray(g)


def assert_right(arrays, got, implementation: str, dtype: str = "float32") -> None:
    """Check that losses and gradients are finite and right up to rounding.

    xla subtracts a log-sum-exp as large as the logits and loses their low digits. Triton subtracts only logits.
    """
    logits, _, weights = arrays
    (losses, g), (want_losses, want_g) = got, wanted(*arrays)
    assert (losses.dtype, g.dtype) == (jnp.float32, jnp.dtype(dtype))
    assert (losses.shape, g.shape) == (want_losses.shape, want_g.shape)
    assert np.isfinite(losses).all()
    assert np.isfinite(np.asarray(g, np.float32)).all()
    lost = max(1.0, float(jnp.abs(logits).max())) if implementation == "xla" else 1.0
    np.testing.assert_allclose(losses, want_losses, rtol=8 * EPS, atol=8 * EPS * lost)
    relative, least = ROUNDING[dtype]
    weight = np.asarray(weights, np.float64)[..., None]
    off = np.abs(np.asarray(g, np.float64) - want_g) - relative * np.abs(want_g) - least
    assert (off <= 16 * EPS * lost * weight).all(), off.max()
    assert not np.asarray(g, np.float32)[np.asarray(weights) == 0].any()


# Interpreter blocks have 16 logits: last block partial, all full, one partial, one logit; then scales and dtypes.
CASES = [
    (37, 1.0, "bfloat16"),
    (48, 1.0, "float32"),
    (5, 3.0, "float32"),
    (1, 1.0, "float32"),
    (37, 1e-4, "float32"),
    (37, 30.0, "float32"),
    (37, 1e4, "float32"),
    (37, 1e-4, "bfloat16"),
    (37, 1e4, "bfloat16"),
    (1037, 3.0, "float16"),
]


@pytest.mark.parametrize(("n_vocab", "scale", "dtype"), CASES)
def test_equals_double_precision(implementation, n_vocab, scale, dtype) -> None:
    arrays = draw(n_vocab, scale)
    assert_right(arrays, op(*arrays, dtype=dtype, implementation=implementation), implementation, dtype)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_similar_logits(implementation, offset) -> None:
    """A large common offset keeps all probabilities similar."""
    logits, *rest = draw(37, 1.0)
    arrays = (logits + offset, *rest)
    assert_right(arrays, op(*arrays, implementation=implementation), implementation)


@pytest.mark.slow
@pytest.mark.parametrize("n_vocab", [4096, 32000, 50257])
@pytest.mark.parametrize("implementation", ["triton"])
def test_with_the_tiles_of_a_gpu(monkeypatch, implementation, n_vocab) -> None:
    monkeypatch.setattr(loss, "tile", lambda n_vocab: loss.TILES["loss"])
    arrays = draw(n_vocab, 5.0, shape=(1, 3))
    assert_right(arrays, op(*arrays, implementation=implementation), implementation)


def test_infinite_negative_logits(implementation) -> None:
    """-inf fills whole blocks, including the first, or everything except the target."""
    logits, targets, weights = draw(50, 2.0)
    logits = logits.at[0].set(jnp.where(jnp.arange(50) < 20, -jnp.inf, logits[0]))
    logits = logits.at[1, 0].set(jnp.where(jnp.arange(50) == 33, 0.5, -jnp.inf))
    targets = jnp.maximum(targets, 20).at[1, 0].set(33)
    losses, g = op(logits, targets, weights, implementation=implementation)
    want_losses, want_g = wanted(jnp.maximum(logits, -1e4), targets, weights)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(g, want_g, atol=2e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_in_the_loss(implementation, bad) -> None:
    logits, targets, weights = draw(50, 2.0)
    losses, _ = op(logits.at[1, 2, 30].set(bad), targets.at[1, 2].set(7), weights, implementation=implementation)
    np.testing.assert_array_equal(np.isfinite(losses), np.arange(6).reshape(2, 3) != 5)


def test_targets_outside_the_vocabulary_give_nan(implementation) -> None:
    """Targets index as in JAX: negative ones count from the end."""
    logits, targets, weights = draw(37, 1.0)
    targets = targets.at[0].set(jnp.asarray([37, -38, -1]))
    losses, g = op(logits, targets, weights, implementation=implementation)
    np.testing.assert_array_equal(np.isnan(losses), [[True, True, False], [False] * 3])
    assert np.isfinite(g).all()
    last, _ = op(logits, targets.at[0, 2].set(36), weights, implementation=implementation)
    assert losses[0, 2] == last[0, 2]


def test_under_vmap_equals_a_loop(implementation) -> None:
    each = [draw(20, 1.0, seed=seed) for seed in range(2)]
    f = partial(op, implementation=implementation)
    got = jax.vmap(f)(*(jnp.stack(x) for x in zip(*each, strict=True)))
    jax.tree.map(np.testing.assert_array_equal, got, jax.tree.map(lambda *x: jnp.stack(x), *(f(*x) for x in each)))


@pytest.mark.parametrize("implementation", ["triton"])
def test_the_loss_in_chunks_has_the_gradients_of_xla(implementation) -> None:
    """In a scan, with a padded chunk, and without a gradient."""
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 11, 8), (8, 29)))
    _, targets, weights = draw(29, 1.0, shape=(3, 11))

    def grads(name: str):
        f = lambda h, w: chunked.cross_entropy(h, w, targets, weights, 12, implementation=name)  # noqa: E731
        return fast_jit(f)(h, w), fast_jit(jax.value_and_grad(f, (0, 1)))(h, w)

    got, want = grads(implementation), grads("xla")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), got, want)


def problem(*, logits="float32", targets="int32", dtype="bfloat16", split=False) -> backend.Problem:
    shapes = (((2, 8, 32000), logits), ((2, 8), targets), ((2, 8), "float32"))
    operands = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in shapes)
    return backend.Problem("gpu", operands, {"dtype": jnp.dtype(dtype), "is_vocabulary_split": split})


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(dtype="float32")) is None
    assert "bfloat16 and float32 and int32" in str(refusal(problem(logits="bfloat16")))
    assert "targets int32" in str(refusal(problem(targets="uint16")))
    assert "dtype is int8" in str(refusal(problem(dtype="int8")))
    assert "devices share" in str(refusal(problem(split=True)))


def test_double_precision_uses_xla() -> None:
    with jax.enable_x64(True):
        logits, targets, weights = draw(20, 1.0)
        arrays = (logits.astype(jnp.float64), targets, weights.astype(jnp.float64))
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton)"):
            op(*arrays, dtype="float64", implementation="triton")
        losses, g = op(*arrays, dtype="float64")
        np.testing.assert_allclose(losses, wanted(*arrays)[0], rtol=1e-14)
        np.testing.assert_allclose(g, wanted(*arrays)[1], atol=1e-15)


@pytest.mark.parametrize(("n_vocab", "tile"), [(32000, (4096, 16)), (4096, (4096, 16)), (260, (512, 4)), (2, (16, 1))])
def test_small_vocabularies_have_small_tiles(monkeypatch: pytest.MonkeyPatch, n_vocab, tile) -> None:
    monkeypatch.setattr(loss.interpreter, "is_chosen", lambda: False)
    assert loss.tile(n_vocab) == tile
