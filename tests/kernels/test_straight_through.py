"""The straight-through op: hard value forward, soft gradient backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.ops import straight_through, top1_straight_through


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_is_a_copy_of_hard(dtype) -> None:
    rng = np.random.default_rng(0)
    hard, soft = (jnp.asarray(rng.normal(size=(50, 7)), dtype) for _ in range(2))
    assert straight_through(hard, soft).tobytes() == hard.tobytes()
    value, _ = jax.vjp(straight_through, hard, soft)
    assert value.tobytes() == hard.tobytes()


def test_gradient_goes_to_soft_in_its_dtype() -> None:
    hard, soft = jnp.ones((3, 4)), jnp.full((3, 4), 0.5, jnp.bfloat16)
    o, pull = jax.vjp(straight_through, hard, soft)
    d_hard, d_soft = pull(2 * jnp.ones_like(o))
    assert (d_hard == 0).all()
    assert d_hard.dtype == hard.dtype
    assert (d_soft == 2).all()
    assert d_soft.dtype == soft.dtype
    assert jax.grad(lambda x: straight_through(jnp.float32(3), x))(jnp.float32(1)) == 1  # scalars too


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_top1_is_one_hot_forward_and_softmax_backward(axis) -> None:
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 6)), jnp.float32)
    o, pull = jax.vjp(lambda s: top1_straight_through(s, axis), scores)
    want = jax.nn.one_hot(scores.argmax(axis), scores.shape[axis], axis=axis)
    np.testing.assert_array_equal(o, want)
    _, pull_soft = jax.vjp(lambda s: jax.nn.softmax(s, axis=axis), scores)
    np.testing.assert_array_equal(pull(scores)[0], pull_soft(scores)[0])


def test_top1_ties_go_first() -> None:
    np.testing.assert_array_equal(top1_straight_through(jnp.zeros((2, 3))), [[1, 0, 0], [1, 0, 0]])


def test_under_jit_vmap_and_remat() -> None:
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    f = jax.grad(lambda s: (top1_straight_through(s) * jnp.arange(6)).sum())
    want = jnp.stack([f(s) for s in scores])
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(scores), want, rtol=1e-6, atol=1e-6)
    remat = jax.grad(lambda s: (jax.checkpoint(top1_straight_through)(s) * jnp.arange(6)).sum())
    np.testing.assert_allclose(remat(scores[0]), want[0], rtol=1e-6, atol=1e-6)


def test_shapes_must_agree() -> None:
    with pytest.raises((ValueError, TypeError)):
        straight_through(jnp.ones((2, 3)), jnp.ones((2, 2)))
