"""KDA: special cases, weak and strong decays, and the lower bound of its decays."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.errors import UserError
from seqjax.nn.params import Template
from seqjax.ops import gated_delta_rule
from tests.models import oracle

DIM, HEADS, T = 16, 2, 70  # a chunk of 64 and a partial chunk


def made(**settings):
    return mixers.KDA(DIM, heads=HEADS, **settings, rngs=nnx.Rngs(0))


def inputs(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def test_equal_decays_per_head_give_gated_deltanet():
    """Use a head's first decay for all its channels.

    Compare with Gated DeltaNet's op and the same operands.
    """
    x_BTD = inputs(1, T, DIM)

    @jax.jit
    def both(x_BTD):
        mixer = made()
        q_BTE, k_BTE, v_BTE = mixer.q_conv(mixer.q(x_BTD)), mixer.k_conv(mixer.k(x_BTD)), mixer.v_conv(mixer.v(x_BTD))
        q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH = mixer._inputs(x_BTD, q_BTE, k_BTE, v_BTE)
        decay_BTHK = jnp.broadcast_to(decay_BTHK[..., :1], decay_BTHK.shape)
        bias_HK = mixer.step_bias_E[...].reshape(HEADS, -1)
        mixer.step_bias_E[...] = jnp.repeat(bias_HK[:, 0], DIM // HEADS)
        got = mixer._recurrence((q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH), None)
        log_g_BTH = -jnp.exp(mixer.log_rate_H[...]) * jax.nn.softplus(decay_BTHK[..., 0] + bias_HK[:, 0])
        beta_BTH = jax.nn.sigmoid(beta_BTH)
        return got, gated_delta_rule(q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_g_BTH, return_state=True)

    got, want = both(x_BTD)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max())


def test_equal_channel_gates_per_head_give_kda():
    """With equal gates for all channels in a head, Gated DeltaNet-2 is KDA.

    The gates use the columns of that head's beta.
    """
    x_BTD = inputs(1, T, DIM)
    kda, gdn2 = made(), made(channel_gates=True)
    nnx.update(gdn2, nnx.state(kda, lambda path, _: path[0] != "beta"))
    gdn2.beta.w[...] = gdn2.write.w[...] = jnp.repeat(kda.beta.w[...], DIM // HEADS, axis=1)
    want = jax.jit(kda)(x_BTD)
    np.testing.assert_allclose(jax.jit(gdn2)(x_BTD), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_full_gate_with_a_low_rank_matrix_is_the_default_gate():
    """W_g = G_1 G_2, with a bias of zero."""
    x_BTD = inputs(1, T, DIM)
    low, full = made(), made(gate_rank="full")
    nnx.update(full, nnx.state(low, lambda path, _: not path[0].startswith("gate")))
    full.gate.w[...] = low.gate_in.w[...] @ low.gate_out.w[...]
    want = jax.jit(low)(x_BTD)
    np.testing.assert_allclose(jax.jit(full)(x_BTD), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("rank", [0, 17, "fll"])
def test_invalid_gate_ranks_are_refused(rank):
    with pytest.raises(UserError, match=r"^gate_rank.*full"):
        made(gate_rank=rank)


def with_decays(params):
    """Set log decays near -100 and -0.001 in every head.

    Keys are far from orthogonal.
    """
    strong = jnp.arange(DIM) % 2 == 0
    return params | {
        "log_rate_H": jnp.zeros(HEADS),
        "step_bias_E": jnp.where(strong, 100.0, jnp.log(jnp.expm1(1e-3))),
        "beta": {"w": 3 * inputs(DIM, HEADS)},
    }


@pytest.mark.slow
def test_strong_and_weak_decays_in_one_head():
    """Outputs match the equations in float64.

    Gradients are finite and match the recurrent form.
    """
    template = Template(lambda rngs, _: mixers.KDA(DIM, heads=HEADS, rngs=rngs))
    params = with_decays(template.init(jax.random.key(0)))
    x_BTD = inputs(1, T, DIM)

    def recurrent(mixer, x_BTD):
        def body(cache, x_BD):
            y_BD, cache = mixer.step(x_BD, cache)
            return cache, y_BD

        cache = mixer.init_cache(len(x_BTD), T, jnp.float32)
        return jnp.moveaxis(jax.lax.scan(body, cache, jnp.moveaxis(x_BTD, 1, 0))[1], 0, 1)

    def run(form):
        def loss(params, x_BTD):
            y_BTD = form(template.bind(params), x_BTD)
            return jnp.sum(y_BTD * jnp.cos(jnp.arange(DIM))), y_BTD

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, x_BTD)

    (_, got), gradients = run(lambda mixer, x_BTD: mixer(x_BTD))
    settings = types.SimpleNamespace(
        heads=HEADS, lower_bound=None, channel_gates=False, gate=True, gate_rank=None, norm_eps=1e-6
    )
    want = oracle.kda(settings, oracle.as_float64(params), np.asarray(x_BTD[0], np.float64))
    np.testing.assert_allclose(got[0], want, rtol=0, atol=1e-4 * np.abs(want).max())
    (_, same), wanted = run(recurrent)
    np.testing.assert_allclose(same[0], want, rtol=0, atol=1e-5 * np.abs(want).max())
    for g, w in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert np.isfinite(g).all()
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-3 * np.abs(w).max())


def test_nonnegative_lower_bounds_are_refused():
    with pytest.raises(UserError, match=r"lower_bound=0\.0"):
        made(lower_bound=0.0)
