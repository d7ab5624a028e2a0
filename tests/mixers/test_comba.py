"""Comba: its limit, the delta rule, and the order of prediction and decay."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from seqjax import mixers
from seqjax.ops import gated_delta_rule

DIM, HEADS, T = 16, 2, 70  # a chunk of 64 and a partial chunk


def test_without_decay_and_shrinking_it_is_the_delta_rule():
    """g = 0 and b = 1, with q corrected by D = 0; compare with DeltaNet's op and the same q, k, v and beta."""
    mixer = mixers.Comba(DIM, heads=HEADS, inner_decay=False, correction=0.0, gate=False, rngs=nnx.Rngs(0))
    plain = mixers.DeltaNet(DIM, heads=HEADS, key_dim=12, value_dim=24, norm_eps=1e-6, rngs=nnx.Rngs(0))
    mixer.log_rate_H[...] = jnp.full(HEADS, -jnp.inf)
    nnx.update(plain, nnx.state(mixer, lambda path, _: path[0] in vars(plain)))
    x_BTD = 10 * jax.random.normal(jax.random.key(1), (2, T, DIM))
    want = jax.jit(plain)(x_BTD)
    np.testing.assert_allclose(jax.jit(mixer)(x_BTD), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_the_prediction_reads_the_state_before_its_decay():
    """With b = e^g in every token, it is Gated DeltaNet, whose prediction reads the decayed state."""
    mixer = mixers.Comba(DIM, heads=HEADS, correction=None, rngs=nnx.Rngs(0))
    mixer.decay.w[...] = jnp.zeros((DIM, HEADS))
    kept_H = jnp.exp(mixer._log_decay(jnp.zeros((1, 1, DIM)))[0, 0])
    mixer.inner_decay_H[...] = jnp.log(kept_H / (1 - kept_H))
    x_BTD = 10 * jax.random.normal(jax.random.key(1), (2, T, DIM))

    @jax.jit
    def both(x_BTD):
        convolved = mixer.q_conv(mixer.q(x_BTD)), mixer.k_conv(mixer.k(x_BTD)), mixer.v_conv(mixer.v(x_BTD))
        r_BTHK, written_BTHK, v_BTHV, log_w_BTHK, _ = operands = mixer._inputs(x_BTD, *convolved)
        beta_BTH = jax.nn.sigmoid(mixer.beta(x_BTD))
        k_BTHK = written_BTHK / beta_BTH[..., None]
        want = gated_delta_rule(r_BTHK, k_BTHK, v_BTHV, beta_BTH, log_w_BTHK[..., 0], return_state=True)
        return mixer._recurrence(operands, None), want

    for got, want in zip(*both(x_BTD), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
