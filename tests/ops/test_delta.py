"""The delta rules and RWKV-7's core: chunked forms equal the recurrence, forward and backward, at any length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.ops.delta_rule import gated_delta_rule, gated_delta_rule_step
from seqjax.ops.wkv7 import wkv7, wkv7_step
from tests import support

B, H, K, V = 2, 3, 8, 6
KINDS = ("delta", "gated", "wkv7")
# Without a gate, the rule is the gated rule with decays of 1.
every_kind = pytest.mark.parametrize("kind", support.slow_unless(lambda kind: kind != "delta", KINDS))
representative_kind = pytest.mark.parametrize("kind", support.slow_unless(lambda kind: kind == "wkv7", KINDS))


def inputs(kind, seq_len, dtype="float32", seed=0, key_dim=K, value_dim=V):
    """Draw inputs as a layer makes them: unit keys, beta and eta in (0, 1), and the model's decay range."""
    rng = np.random.default_rng(seed)
    shape = (B, seq_len, H)

    def unit():
        x = rng.normal(size=(*shape, key_dim))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def sigmoid(*rest):
        return 1 / (1 + np.exp(-2 * rng.normal(size=(*shape, *rest))))

    v = rng.normal(size=(*shape, value_dim))
    if kind == "wkv7":
        kappa = unit()
        log_w = -np.exp(-0.5) * sigmoid(key_dim)
        arrays = [unit(), unit(), v, log_w, -kappa, kappa * sigmoid(key_dim)]
    else:
        arrays = [unit(), unit(), v, sigmoid()]
        if kind == "gated":
            # As in a layer; a chunk's sum stays near -40, so differences between sums keep their digits.
            arrays.append(-np.exp(rng.normal(size=shape) - 1))
    return [jnp.asarray(x, dtype) for x in arrays]


def state(seed=1, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, H, K, V)), dtype)


def op(kind):
    return wkv7 if kind == "wkv7" else gated_delta_rule


def run(kind, args, s=None, chunk=None):
    """Return outputs and last state from one program, because eager calls would compile every operation."""
    options = {"return_state": True, "chunk_size": chunk}
    return jax.jit(lambda args, s: op(kind)(*args, initial_state=s, **options))(args, s)


@functools.partial(jax.jit, static_argnums=0)
def recurrent(kind, args, s):
    """Compute the definition, one position at a time."""

    def body(s, xs):
        if kind == "wkv7":
            o, s = wkv7_step(*xs, s)
        else:
            o, s = gated_delta_rule_step(*xs[:4], xs[4] if kind == "gated" else None, s)
        return s, o

    s, o = jax.lax.scan(body, s, tuple(jnp.moveaxis(x, 1, 0) for x in args))
    return jnp.moveaxis(o, 0, 1), s


def assert_close(got, want, tol):
    """Compare within `tol` of the array's scale: sums cancel, so small entries have the error of large ones."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(1e-3, float(np.abs(w).max()))
        np.testing.assert_allclose(g, w, rtol=0, atol=tol * scale)


# ------------------------------------------------------------------------------------------- chunks and the recurrence
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("seq_len", "chunk"),
    support.slow_unless(lambda n, _: n in (21, 70), [(1, None), (21, 8), (21, 1), (32, 16), (70, None)]),
)
def test_chunks_equal_the_recurrence(kind, seq_len, chunk):
    args, s = inputs(kind, seq_len), state()
    assert_close(run(kind, args, s, chunk), recurrent(kind, args, s), 3e-6)
    zero = jax.jit(lambda *args: op(kind)(*args, chunk_size=chunk))(*args)
    assert_close(zero, recurrent(kind, args, jnp.zeros_like(s))[0], 3e-6)


@representative_kind
def test_state_continues_a_sequence(kind):
    args = inputs(kind, 21)
    first, second = [x[:, :9] for x in args], [x[:, 9:] for x in args]
    o1, s = run(kind, first, chunk=4)
    o2, s = run(kind, second, s, chunk=8)
    undivided = run(kind, args, chunk=16)
    assert_close((jnp.concatenate([o1, o2], 1), s), undivided, 3e-6)


@functools.cache
def gradients(kind, chunk, dtype):
    """Return the gradients of all inputs and the initial state.

    The loss uses outputs and last state; chunk 0 selects the recurrence.
    """
    args, s = inputs(kind, 21, dtype), state(dtype=dtype)
    rng = np.random.default_rng(3)
    g_o, g_s = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((B, 21, H, V), (B, H, K, V)))

    def loss(args, s):
        if chunk:
            o, s = op(kind)(*args, initial_state=s, return_state=True, chunk_size=chunk)
        else:
            o, s = recurrent(kind, args, s)
        return jnp.sum(o * g_o) + jnp.sum(s * g_s)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(args, s)


@every_kind
@pytest.mark.parametrize("chunk", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_gradients_equal_the_recurrence(kind, chunk):
    assert_close(gradients(kind, chunk, "float32"), gradients(kind, 0, "float32"), 2e-5)


@pytest.mark.slow
@every_kind
def test_chunks_equal_the_recurrence_in_float64(kind):
    """Both forms are the same function beyond float32 rounding."""
    with jax.enable_x64(True):
        args, s = inputs(kind, 21, "float64"), state(dtype="float64")
        got = run(kind, args, s, 8)
        assert got[0].dtype == got[1].dtype == jnp.float64
        assert_close(got, recurrent(kind, args, s), 1e-13)
        assert_close(gradients(kind, 8, "float64"), gradients(kind, 0, "float64"), 1e-12)


# ------------------------------------------------------------------------------------------------------ low precision
@pytest.mark.slow
@every_kind
def test_bfloat16_stays_near_float32(kind):
    rounded = inputs(kind, 96, "bfloat16", key_dim=32, value_dim=32)
    exact = [x.astype(jnp.float32) for x in rounded]
    got, want = jax.jit(op(kind))(*rounded), jax.jit(op(kind))(*exact)
    assert got.dtype == jnp.bfloat16
    error = np.asarray(got.astype(jnp.float32) - want)
    assert np.sqrt(np.mean(error**2)) < 0.01 * np.std(want)


@representative_kind
def test_extreme_inputs_stay_finite(kind):
    """Equal keys, full correction and decays at both ends of their range, in bfloat16, forward and backward."""
    args = inputs(kind, 130, "bfloat16")
    ones = jnp.ones_like(args[0]) / np.sqrt(K)
    if kind == "wkv7":
        edge = jnp.where(jnp.arange(130)[:, None, None] % 5 > 0, -0.6065, 0.0)
        args = [args[0], ones, args[2], jnp.broadcast_to(edge, args[3].shape), -ones, ones]
    else:
        args[1], args[3] = ones, jnp.ones_like(args[3])
        if kind == "gated":
            args[4] = jnp.where(jnp.arange(130)[:, None] % 7 == 3, -300.0, -1e-4) * jnp.ones_like(args[4], jnp.float32)

    @jax.jit
    def with_grads(*args):
        o, pull = jax.vjp(op(kind), *args)
        return o, pull(jnp.ones_like(o))

    o, grads = with_grads(*args)
    for x in (o, *grads):
        assert np.isfinite(np.asarray(x, np.float32)).all()
    assert np.abs(np.asarray(o, np.float32)).max() < 100


@pytest.mark.slow
@every_kind
def test_memory_of_the_backward_pass_is_linear(kind):
    def temp(seq_len):
        args = [jax.ShapeDtypeStruct((*x.shape[:1], seq_len, *x.shape[2:]), x.dtype) for x in inputs(kind, 2)]
        grad = jax.grad(lambda args: jnp.sum(op(kind)(*args, chunk_size=16)))
        return jax.jit(grad).lower(args).compile().memory_analysis().temp_size_in_bytes

    assert temp(2048) < 2.2 * temp(1024)
