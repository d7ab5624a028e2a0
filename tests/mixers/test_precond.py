"""The preconditioned delta rules: their limits, and the decayed sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.errors import UserError
from seqjax.mixers._precond import CHUNK, decayed_sums

DIM, HEADS, T = 16, 2, 70  # chunks of 64 and of CHUNK, and partial chunks
PLAIN = {mixers.PrecondGatedDeltaNet: mixers.GatedDeltaNet, mixers.PrecondKDA: mixers.KDA}


@pytest.mark.parametrize("precond", PLAIN)
def test_a_bound_of_one_gives_the_plain_rule(precond):
    mixer = precond(DIM, heads=HEADS, precond_bound=1.0, rngs=nnx.Rngs(0))
    plain = PLAIN[precond](DIM, heads=HEADS, rngs=nnx.Rngs(1))
    nnx.update(plain, nnx.state(mixer, lambda path, _: path[0] != "precond"))
    x_BTD = 10 * jax.random.normal(jax.random.key(1), (2, T, DIM))
    want = jax.jit(plain)(x_BTD)
    np.testing.assert_allclose(jax.jit(mixer)(x_BTD), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("n_tokens", [1, CHUNK, 2 * CHUNK + 5])
def test_decayed_sums_equal_the_loop(n_tokens):
    """Decays are between none and e^-100. A chunk's log decays sum to thousands, in float32 with errors up to 1e-4."""
    rng = np.random.default_rng(0)
    x_BTHK, initial_BHK = rng.uniform(size=(2, n_tokens, HEADS, 3)), rng.uniform(size=(2, HEADS, 3))
    log_g_BTH = -np.exp(rng.uniform(-12, np.log(100), size=(2, n_tokens, HEADS)))
    want, last_BHK = [], initial_BHK
    for t in range(n_tokens):
        last_BHK = np.exp(log_g_BTH[:, t, :, None]) * last_BHK + x_BTHK[:, t]
        want.append(last_BHK)
    got = jax.jit(decayed_sums)(*(jnp.asarray(x, jnp.float32) for x in (x_BTHK, log_g_BTH, initial_BHK)))
    np.testing.assert_allclose(got[0], np.stack(want, 1), rtol=1e-4)
    np.testing.assert_allclose(got[1], last_BHK, rtol=1e-4)


@pytest.mark.parametrize("bound", [0.9, 2.1])
def test_invalid_bounds_are_refused(bound):
    with pytest.raises(UserError, match=f"precond_bound={bound}"):
        mixers.PrecondKDA(DIM, heads=HEADS, precond_bound=bound, rngs=nnx.Rngs(0))
