"""Gated DeltaProduct: chunked equations, Gated DeltaNet, modular counting."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.errors import UserError
from seqjax.nn.params import Template
from tests import support
from tests.models import oracle

DIM, HEADS, T = 16, 2, 45  # 90 or 135 steps: one or two chunks of 64, plus a partial chunk
SETTINGS = {"key_dim": 12, "value_dim": 20}
CASES = [
    {"steps": 2},
    {"steps": 3, "allow_negative_eigenvalues": False},
    {"steps": 2, "decay": False, "chunk_size": 7},
]
every_case = pytest.mark.parametrize(
    "settings", support.slow_unless(lambda settings: settings["steps"] == 3, CASES), ids=str
)


def template(mixer: Any = mixers.GatedDeltaProduct, **settings):
    return Template(lambda rngs, _: mixer(DIM, heads=HEADS, **SETTINGS | settings, rngs=rngs))


def drawn(shapes):
    """Draw weights with the full range of beta and far from orthogonal keys."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32) / 2, shapes)


def inputs(n_batch=2):
    return jnp.asarray(np.random.default_rng(1).normal(size=(n_batch, T, DIM)), jnp.float32)


def expected(params, x_BTD, **settings):
    """Compute the equations in float64."""
    known = {"heads": HEADS, "norm_eps": 1e-6, "decay": True, "gate": True, "allow_negative_eigenvalues": True}
    params = oracle.as_float64(params)
    return np.stack([oracle.delta_product(types.SimpleNamespace(**known | settings), params, x) for x in x_BTD])


@every_case
def test_outputs_match_the_equations(settings):
    """Compare in float32 and bfloat16.

    The bfloat16 case rounds inputs and weights first, so only its products add rounding.
    """
    made = template(**settings)
    params, x_BTD = drawn(made.shapes), inputs()
    run = jax.jit(lambda params, x_BTD: made.bind(params)(x_BTD))
    want = expected(params, np.asarray(x_BTD, np.float64), **settings)
    np.testing.assert_allclose(run(params, x_BTD), want, rtol=0, atol=5e-6 * np.abs(want).max())

    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (params, x_BTD))
    want = expected(rounded[0], np.asarray(rounded[1], np.float64), **settings)
    got = run(rounded[0], rounded[1].astype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    error = np.asarray(got, np.float64) - want
    assert np.sqrt(np.mean(error**2)) < 0.02 * np.sqrt(np.mean(want**2))


def test_one_step_with_positive_eigenvalues_is_gated_deltanet():
    """Outputs and gradients are bitwise equal with the same parameters."""
    one = template(steps=1, allow_negative_eigenvalues=False)
    same = template(mixers.GatedDeltaNet)
    assert one.shapes == same.shapes
    assert one.axes == same.axes
    params, x_BTD = drawn(one.shapes), inputs()

    def loss(made):
        return jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.sin(made.bind(params)(x_BTD)))))(params)

    for got, want in zip(jax.tree.leaves(loss(one)), jax.tree.leaves(loss(same)), strict=True):
        np.testing.assert_array_equal(got, want)


@every_case
def test_gradients_match_a_loop_over_the_steps(settings):
    """Compare with autodiff through a loop over tokens and steps.

    Convolutions and norm come from the mixer.
    """
    made = template(**settings)
    params, x_BTD = drawn(made.shapes), inputs(1)
    n = settings["steps"]

    def loop(mixer, x_BTD):
        q_THK = mixer.q_conv(mixer.q(x_BTD)).reshape(T, HEADS, -1)
        k_THnK = mixer.k_conv(mixer.k(x_BTD)).reshape(T, HEADS, n, -1)
        v_THnV = mixer.v_conv(mixer.v(x_BTD)).reshape(T, HEADS, n, -1)
        most = 2 if settings.get("allow_negative_eigenvalues", True) else 1
        beta_THn = most * jax.nn.sigmoid(mixer.beta(x_BTD).reshape(T, HEADS, n))
        log_g_BTH = mixer._log_decay(x_BTD)
        keep_TH = jnp.ones((T, HEADS)) if log_g_BTH is None else jnp.exp(log_g_BTH[0])

        def token(s_HKV, operands):
            q_HK, k_HnK, v_HnV, beta_Hn, keep_H = operands
            s_HKV = keep_H[:, None, None] * s_HKV
            for j in range(n):
                wrong_HV = v_HnV[:, j] - jnp.einsum("hk,hkv->hv", k_HnK[:, j], s_HKV)
                s_HKV = s_HKV + jnp.einsum("hk,hv,h->hkv", k_HnK[:, j], wrong_HV, beta_Hn[:, j])
            return s_HKV, jnp.einsum("hk,hkv->hv", q_HK, s_HKV)

        s_HKV = jnp.zeros((HEADS, q_THK.shape[-1], v_THnV.shape[-1]))
        _, o_THV = jax.lax.scan(token, s_HKV, (q_THK, k_THnK, v_THnV, beta_THn, keep_TH))
        return mixer._output(x_BTD, o_THV[None])

    def gradients(form):
        def loss(params, x_BTD):
            return jnp.sum(form(made.bind(params), x_BTD) * jnp.cos(jnp.arange(DIM)))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x_BTD)

    got, want = gradients(lambda mixer, x_BTD: mixer(x_BTD)), gradients(loop)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=3e-5 * np.abs(w).max())


# ------------------------------------------------------------------------------------------------------ state tracking
def counter(steps, allow_negative_eigenvalues):
    """Build a mixer that counts ones modulo steps + 1.

    Its three inputs are a constant, the bit (+-1) and a first-token flag. Keys are 60 degrees apart. A one (beta = 2)
    reflects the state in each key: one reflection has order two; two reflections are a rotation by 120 degrees, which
    has order three. A zero (beta = 0) keeps the state. The first token is a one that writes the state.
    """
    settings = {"steps": steps, "decay": False, "allow_negative_eigenvalues": allow_negative_eigenvalues}
    made = Template(lambda rngs, _: mixers.GatedDeltaProduct(3, heads=1, key_dim=2, value_dim=2, **settings, rngs=rngs))
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), made.shapes)
    angles = np.arange(steps) * np.pi / 3
    params["k"]["w"][0] = 30 * np.stack([np.cos(angles), np.sin(angles)], axis=1).ravel()  # silu(30 x) is nearly 30 x
    params["q"]["w"][0] = 30, 10
    params["v"]["w"][2] = np.array([[30, 10], [5, 40]])[:steps].ravel()
    params["beta"]["w"][1] = 40
    params["gate"]["w"][0] = 30
    params["out"]["w"][:, :2] = np.eye(2)
    params["norm"]["g"][:] = 1
    for name in ("q_conv", "k_conv", "v_conv"):
        params[name]["w"][:, -1] = 1
    return made, params


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_count_modulo_one_more(steps):
    """Parity needs one negative eigenvalue.

    A 120-degree rotation within a token needs two.
    """
    modulus, n_tokens = steps + 1, 300
    bits = np.random.default_rng(0).integers(0, 2, n_tokens)
    bits[0] = 1
    first = np.arange(n_tokens) == 0
    x_BTD = jnp.asarray(np.stack([np.ones(n_tokens), 2 * bits - 1, first], axis=1), jnp.float32)[None]

    def outputs(allow):
        made, params = counter(steps, allow)
        y_TD = np.asarray(jax.jit(lambda params, x: made.bind(params)(x))(params, x_BTD))[0]
        return [y_TD[np.cumsum(bits) % modulus == rest] for rest in range(modulus)]

    of_class = outputs(True)
    scale = max(np.abs(y).max() for y in of_class)
    for rest, y in enumerate(of_class):
        np.testing.assert_allclose(y, np.broadcast_to(y[0], y.shape), rtol=0, atol=1e-3 * scale)
        other = of_class[(rest + 1) % modulus]
        assert np.abs(y[0] - other[0]).max() > 0.1 * scale
    # With beta at most 1, a step erases the state along its key, so the state does not survive many ones.
    late = [y[-1] for y in outputs(False)]
    assert np.abs(late[0] - late[1]).max() < 0.1 * scale


def test_invalid_settings_are_refused():
    with pytest.raises(UserError, match=r"^steps .*0"):
        mixers.GatedDeltaProduct(DIM, heads=HEADS, steps=0, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r"heads=3 .*8 .*key_dim"):
        mixers.GatedDeltaProduct(DIM, heads=3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("value_heads", [0, 3, 5])
def test_value_heads_that_key_heads_do_not_divide_are_refused(value_heads):
    with pytest.raises(UserError, match=rf"^value_heads\b.*{value_heads}"):
        mixers.GatedDeltaNet(DIM, heads=2, key_dim=8, value_dim=30, value_heads=value_heads, rngs=nnx.Rngs(0))
