"""The batched inverse of unit lower triangular matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import unit_lower_inverse


@pytest.mark.parametrize("n", [1, 2, 5, 8, 16, 23, 64])
def test_inverse(n):
    m = np.tril(np.random.default_rng(n).normal(size=(2, 3, n, n)) * 0.3, -1)
    got = jax.jit(unit_lower_inverse)(jnp.asarray(m, jnp.float32))
    want = np.linalg.inv(np.eye(n) + m)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_inverse_of_equal_keys_keeps_its_digits():
    """Use a repeated token, for which M is all ones.

    The powers of M reach 1e18, while its inverse has entries +-1.
    """
    m = jnp.tril(jnp.ones((64, 64)), -1)
    want = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_allclose(unit_lower_inverse(m), want, atol=1e-5)


def test_inverse_gradient():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        m, g = (jnp.asarray(np.tril(rng.normal(size=(11, 11)), -1)) for _ in range(2))

        def loss(f):
            return jax.grad(lambda m: jnp.sum(f(jnp.tril(m, -1)) * g))(m)

        np.testing.assert_allclose(loss(unit_lower_inverse), loss(lambda m: jnp.linalg.inv(jnp.eye(11) + m)), atol=1e-9)
