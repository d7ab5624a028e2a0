"""Choices, attention and the loss of an index against NumPy, dense masks and autodiff."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from seqjax.ops import index as ops

B, T, H, G, I, N, K = 2, 21, 4, 2, 3, 4, 6


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Split 21 queries into five groups of 4, in tiers of two groups and of one, and a shorter group."""
    monkeypatch.setattr(ops, "GROUP", 4)


def best(scores, visible, n):
    """Mark the n largest visible scores; the earlier score wins a tie."""
    marks = np.zeros(scores.shape, bool)
    for at in np.ndindex(scores.shape[:-1]):
        order = np.argsort(-scores[at], kind="stable")
        marks[at][[s for s in order if visible[at][s]][:n]] = True
    return marks


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 5, 20, 21, 40])
def test_the_largest_scores_are_marked(dtype, n):
    rng = np.random.default_rng(n)
    scores = np.round(rng.normal(size=(3, T, T)), 1).astype(dtype)  # many ties
    scores[0, :, ::3] = 0.0
    scores[1] *= 1e-38  # with subnormal numbers
    scores[2, 5] = np.inf
    visible = np.broadcast_to(np.tri(T, dtype=bool), scores.shape)
    with jax.enable_x64(dtype == "float64"):
        got = jax.jit(ops.largest, static_argnums=2)(jnp.asarray(scores), jnp.asarray(visible), n)
    want = np.abs(scores).max() > 0 and best(scores, visible, n)
    np.testing.assert_array_equal(got, want)


def test_zeros_have_one_sign():
    """A negative head weight times a score of zero is minus zero, whose bits are not those of zero."""
    q, k, w = jnp.ones((1, T, 1, 1)), -jnp.ones((1, T, 1)), -jnp.ones((1, T, 1))
    scores = ops.relu_scores((q, w), k)
    assert not np.any(scores) and not np.signbit(scores).any()


@pytest.mark.parametrize("n", [1, 32, 33, 70])
def test_bits_return_unchanged(n):
    marks = np.random.default_rng(n).random((3, n)) > 0.5
    packed = ops.pack(jnp.asarray(marks))
    assert packed.shape == (3, -(-n // 32)) and packed.dtype == jnp.uint32
    np.testing.assert_array_equal(ops.unpack(packed, n), marks)


def operands(seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(B, T, H, K), (B, T, G, K), (B, T, G, K), (B, T, H, K), (B, T, I, N), (B, T, I), (B, T, N), (B, T, G, N)]
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def dense(q, k, v, mask):
    """Return the attention [B, T, H, K] and the weights [B, H, T, S]."""
    k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    s = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(K)
    p = jax.nn.softmax(jnp.where(mask, s, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", p, v), p


def test_attention_and_gradients_match_a_dense_mask():
    with jax.enable_x64(True):
        q, k, v, weight, iq, w, ik, _ = operands()
        bits = jax.jit(lambda q, w, k: ops.choose_keys(ops.relu_scores, (q, w), k, jnp.arange(T), 5))(iq, w, ik)
        scores = np.einsum("bti,btis->bts", w, np.maximum(np.einsum("btin,bsn->btis", iq, ik) / np.sqrt(N), 0))
        visible = np.broadcast_to(np.tri(T, dtype=bool), scores.shape)
        mask = best(scores, visible, 5)
        np.testing.assert_array_equal(ops.unpack(bits, T), mask)

        def result_and_gradients(attend):
            o, pull = jax.vjp(attend, q, k, v)
            return o, *pull(weight)

        want = jax.jit(lambda: result_and_gradients(lambda *x: dense(*x, mask[:, None])[0]))()
        got = jax.jit(lambda: result_and_gradients(lambda *x: ops.chosen_attention(*x, bits)))()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), got, want)


@pytest.mark.slow
def test_attention_with_the_own_key_is_selected_chunk_attention():
    """Chunks of one key are the same attention in another op."""
    q, k, v, *_ = (x.astype(jnp.float32) for x in operands())
    own, visible = np.eye(T, dtype=bool), np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    mask = best(np.random.default_rng(1).normal(size=(B, T, T)) + 9 * own, visible, 4)
    past = [[[*np.flatnonzero(row & ~own[t]), -1, -1, -1][:3] for t, row in enumerate(rows)] for rows in mask]
    sel = jnp.repeat(jnp.asarray(past, jnp.int32)[:, :, None], H, axis=2)
    want = kernels_pallas.selected_chunk_attention(q, k, v, sel, chunk_size=1, implementation="xla")
    got = jax.jit(ops.chosen_attention)(q, k, v, ops.pack(jnp.asarray(mask)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", ["shared", "per key head"])
def test_the_loss_and_its_gradients_match_autodiff(rows):
    with jax.enable_x64(True):
        q, k, v, _, iq, w, ik, gq = operands()
        shared = rows == "shared"
        queries, score = ((iq, w), ops.relu_scores) if shared else (gq, ops.dot_scores)
        n_rows = 1 if shared else G
        scores = np.asarray(score(queries, ik))
        mask = jnp.asarray(best(scores, np.broadcast_to(np.tri(T, dtype=bool)[:, None], scores.shape), 5))

        def reference(queries, ik):
            heads = jnp.repeat(jnp.moveaxis(mask, 2, 1), H // n_rows, axis=1)
            p = jax.lax.stop_gradient(dense(q, k, v, heads)[1]).reshape(B, n_rows, -1, T, T).mean(2)
            i = jnp.moveaxis(score(queries, ik), 2, 1)
            log_r = jax.nn.log_softmax(jnp.where(jnp.moveaxis(mask, 2, 1), i, -1e30), axis=-1)
            return jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1)) - log_r), 0).sum(-1).mean()

        def ours(queries, ik, q, k):
            return ops.index_loss(score, lambda chosen, _, n: chosen[..., :n], queries, ik, q, k, mask)

        want, d_want = jax.jit(jax.value_and_grad(reference, (0, 1)))(queries, ik)
        got, (*d_got, dq, dk) = jax.jit(jax.value_and_grad(ours, (0, 1, 2, 3)))(queries, ik, q, k)
    assert float(want) > 0.1
    assert float(got) == pytest.approx(float(want), abs=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), tuple(d_got), d_want)
    assert not np.any(dq) and not np.any(dk)


@pytest.mark.slow
def test_the_gradient_of_the_scores_is_a_difference_of_weights():
    """dL/dI = (softmax(I) - p) / tokens, exactly 0 at masked keys."""
    q, k, v, *_ = (x.astype(jnp.float32) for x in operands())
    mask = jnp.broadcast_to(jnp.tri(T, dtype=bool)[:, None] & (jnp.arange(T) % 3 != 1), (B, T, 1, T))
    i = jnp.asarray(np.random.default_rng(3).normal(size=(B, T, 1, T)), jnp.float32)

    def loss(i):
        return ops.index_loss(
            lambda i, k: i[..., : k.shape[1]], lambda m, _, n: m[..., :n], i, jnp.zeros((B, T, 1)), q, k, mask
        )

    p = dense(q, k, v, jnp.moveaxis(mask, 2, 1))[1].mean(1)[:, :, None]
    want = (jax.nn.softmax(jnp.where(mask, i, -jnp.inf), axis=-1) - p) / (B * T)
    got = jax.jit(jax.grad(loss))(i)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-8)
    assert not np.any(np.asarray(got)[~np.asarray(mask)])


def test_training_memory_is_linear_in_the_length(monkeypatch):
    """No array of the training program has the size of a score matrix at 2,048 tokens."""
    monkeypatch.setattr(ops, "GROUP", 256)
    length = 2048

    def objective(q, k, v, iq, w, ik):
        bits = ops.choose_keys(ops.relu_scores, (iq, w), ik, jnp.arange(length), 64)
        is_chosen = lambda bits, _, n: ops.unpack(bits, n)[:, :, None]  # noqa: E731
        loss = ops.index_loss(ops.relu_scores, is_chosen, (iq, w), ik, q, k, bits)
        return (ops.chosen_attention(q, k, v, bits) ** 2).sum() + loss

    shapes = [(2, 4), (1, 4), (1, 4), (1, 4), (1,), (4,)]
    inputs = [jax.ShapeDtypeStruct((1, length, *shape), jnp.float32) for shape in shapes]
    program = str(jax.jit(jax.grad(objective, range(6))).lower(*inputs).compile().as_text())
    sizes = [int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"[a-z]\d+\[([\d,]+)\]", program)]
    assert max(sizes) < length * length // 2
