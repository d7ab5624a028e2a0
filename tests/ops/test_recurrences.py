"""Chunked forms against the recurrences: lengths, chunk sizes, states, gradients and extreme decays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax import ops
from tests import support
from tests.ops import recurrences

B, H, K, V, E, N = 2, 2, 5, 3, 4, 3


def draw(rng, *shape):
    return rng.standard_normal(shape)


def ssd_inputs(rng, t, decay):
    log_a = -decay * np.exp(draw(rng, B, t, H))
    return (draw(rng, B, t, H, V), log_a, draw(rng, B, t, N), draw(rng, B, t, N)), draw(rng, B, H, N, V)


def wkv6_inputs(rng, t, decay):
    r, k = draw(rng, B, t, H, K), draw(rng, B, t, H, K)
    log_w = -decay * np.exp(draw(rng, B, t, H, K))
    return (r, k, draw(rng, B, t, H, V), log_w, draw(rng, H, K)), draw(rng, B, H, K, V)


def wkv5_inputs(rng, t, decay):
    (r, k, v, log_w, u), state = wkv6_inputs(rng, t, decay)
    return (r, k, v, log_w[:1, :1], u), state


def scan_inputs(rng, t, decay):
    dt = decay * np.exp(draw(rng, B, t, E))
    a = -np.exp(0.5 * draw(rng, E, N))
    return (draw(rng, B, t, E), dt, a, draw(rng, B, t, N), draw(rng, B, t, N), draw(rng, E)), draw(rng, B, E, N)


OPS = {
    "ssd": (ops.ssd, recurrences.ssd, ssd_inputs),
    "wkv6": (ops.wkv6, recurrences.wkv6, wkv6_inputs),
    "wkv5": (ops.wkv6, recurrences.wkv6, wkv5_inputs),
    "selective_scan": (ops.selective_scan, recurrences.selective_scan, scan_inputs),
}
# wkv5 is wkv6 with one decay for all positions.
every_op = pytest.mark.parametrize("name", support.slow_unless(lambda name: name != "wkv5", OPS))


def inputs(name, t, *, decay=0.3, seed=0, dtype=np.float32):
    arrays, state = OPS[name][2](np.random.default_rng(seed), t, decay)
    return tuple(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(state, dtype)


def chunked(name, chunk_size):
    def f(arrays, state):
        return OPS[name][0](*arrays, initial_state=state, return_state=True, chunk_size=chunk_size)

    return jax.jit(f)


def recurrent(name):
    return jax.jit(lambda arrays, state: OPS[name][1](*arrays, state))


def close(got, want, tolerance):
    """Compare relative to each array's scale, because the results are sums over time."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(1.0, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


# T = 1, below one chunk, whole chunks, and a partial chunk; chunks of 40 and 64 are halved down to blocks of 16.
@every_op
@pytest.mark.parametrize(
    ("t", "chunk"),
    support.slow_unless(
        lambda t, chunk: (t, chunk) in ((3, 8), (70, 7), (64, 64)),
        [(1, None), (3, 8), (70, 1), (70, 7), (70, 40), (64, 64), (150, None)],
    ),
)
def test_chunked_equals_recurrent(name, t, chunk):
    if chunk == 1:
        t = 40  # enough for a scan of T states
    arrays, state = inputs(name, t)
    close(chunked(name, chunk)(arrays, state), recurrent(name)(arrays, state), 1e-5)


@every_op
def test_state_continues_a_sequence(name):
    arrays, state = inputs(name, 37)
    want = chunked(name, 8)(arrays, state)

    def part(x, at):
        return x[:, at] if x.ndim > 2 and x.shape[1] == 37 else x

    first, state = chunked(name, 8)([part(x, slice(0, 20)) for x in arrays], state)
    second, state = chunked(name, 8)([part(x, slice(20, 37)) for x in arrays], state)
    close((jnp.concatenate([first, second], axis=1), state), want, 1e-5)


@every_op
def test_no_state_equals_a_zero_state(name):
    arrays, state = inputs(name, 9)
    stateless = jax.jit(functools.partial(OPS[name][0], chunk_size=4))(*arrays)
    close(stateless, chunked(name, 4)(arrays, jnp.zeros_like(state))[0], 1e-6)


def loss(f, weights):
    def scalar(arrays, state):
        y, last = f(arrays, state)
        return jnp.sum(y * weights[0]) + jnp.sum(last * weights[1])

    return jax.jit(jax.grad(scalar, argnums=(0, 1)))


def chunked_and_recurrent_gradients(name, t, chunk, dtype=np.float32):
    arrays, state = inputs(name, t, dtype=dtype)
    shapes = jax.eval_shape(recurrent(name), arrays, state)
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.standard_normal(s.shape), dtype) for s in shapes]
    return loss(chunked(name, chunk), weights)(arrays, state), loss(recurrent(name), weights)(arrays, state)


@every_op
@pytest.mark.parametrize(("t", "chunk"), support.slow_unless(lambda t, _: t == 37, [(1, None), (37, 8), (100, 64)]))
def test_gradients_equal_the_recurrence(name, t, chunk):
    close(*chunked_and_recurrent_gradients(name, t, chunk), 3e-5)


@pytest.mark.slow
@every_op
def test_chunked_equals_recurrent_in_float64(name):
    """Float32 rounding could hide small mistakes."""
    with jax.enable_x64(True):
        arrays, state = inputs(name, 37, dtype=np.float64)
        close(chunked(name, 32)(arrays, state), recurrent(name)(arrays, state), 1e-12)
        close(*chunked_and_recurrent_gradients(name, 37, 32, np.float64), 1e-11)


@pytest.mark.slow
@every_op
@pytest.mark.parametrize("dtype", support.slow_unless(lambda x: x == jnp.float32, [jnp.float32, jnp.bfloat16]))
def test_extreme_decays_stay_finite(name, dtype):
    """Decays of e^-20 and below alternate with steps that forget nothing."""
    rng = np.random.default_rng(2)
    arrays, state = inputs(name, 70, decay=1.0, dtype=dtype)
    decay_index = {"ssd": 1, "wkv6": 3, "wkv5": 3, "selective_scan": 1}[name]
    values = np.where(rng.random(arrays[decay_index].shape) < 0.5, -200.0, -1e-4)
    values = -values if name == "selective_scan" else values
    arrays = [jnp.asarray(values, jnp.float32) if i == decay_index else x for i, x in enumerate(arrays)]
    state = state.astype(jnp.float32)
    got, want = chunked(name, 64)(arrays, state), recurrent(name)(arrays, state)
    close(jax.tree.map(lambda x: x.astype(jnp.float32), got), want, 1e-4 if dtype == jnp.float32 else 0.05)
    grads = jax.grad(lambda a, s: chunked(name, 64)(a, s)[0].astype(jnp.float32).sum(), argnums=(0, 1))(arrays, state)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(grads))


@every_op
def test_outputs_are_causal_to_the_last_bit(name):
    """Also within a chunk."""
    arrays, state = inputs(name, 41)
    changed = [x.at[:, 29:].add(1.0) if x.ndim > 2 and x.shape[1] == 41 else x for x in arrays]
    f = chunked(name, 16)
    before, after = f(arrays, state)[0], f(changed, state)[0]
    np.testing.assert_array_equal(before[:, :29], after[:, :29])
    assert (np.asarray(before[:, 29:]) != np.asarray(after[:, 29:])).any()


# ---------------------------------------------------------------------------------------------------------- memory
def peak_bytes(name, t):
    arrays, state = jax.eval_shape(functools.partial(inputs, name, t))
    grad = jax.jit(jax.grad(lambda a, s: chunked(name, 8)(a, s)[0].sum(), argnums=(0, 1)))
    return grad.lower(arrays, state).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@every_op
def test_memory_grows_linearly(name):
    small, large = peak_bytes(name, 512), peak_bytes(name, 2048)
    assert large < 5 * small
