"""RWKV-7: initialisers, first-layer values, and QK norm in its shell."""

import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.mixers import base
from seqjax.mixers.rwkv7_shell import RWKV7Shell
from seqjax.nn.initializers import orthogonal
from tests import support


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_orthogonal_initialiser(shape):
    w = np.asarray(jax.jit(lambda key: orthogonal(0.5)(key, shape, jnp.float32))(jax.random.key(0)))
    gram = w @ w.T if shape[0] < shape[1] else w.T @ w
    gain = 0.5 * max(1, (shape[1] / shape[0]) ** 0.5)
    np.testing.assert_allclose(gram, gain**2 * np.eye(min(shape)), atol=1e-6)


def test_the_first_layers_values_reach_the_second():
    """The first layer's v-LoRA has no gradient; the second layer's v-LoRA has one."""
    model = support.tiny_model("rwkv7")
    weights, tokens = support.random_params(model), support.random_tokens((2, 9))
    mixer = weights["blocks"]["0"]["mixer"]

    def loss(bias):  # other gradients would take seconds to compile
        with_bias = {**mixer, "v_lora": {**mixer["v_lora"], "bias": bias}}
        block = {**weights["blocks"]["0"], "mixer": with_bias}
        return jnp.sum(model.logits({**weights, "blocks": {**weights["blocks"], "0": block}}, tokens) ** 2)

    share = np.abs(np.asarray(jax.jit(jax.grad(loss))(mixer["v_lora"]["bias"]))).max(-1)
    assert share[0] == 0
    assert share[1] > 0


CORES = typing.get_args(base.settings_of(RWKV7Shell.__init__)["core"][0])


@pytest.mark.parametrize(
    ("core", "qk_norm"),
    support.slow_unless(
        lambda core, qk_norm: qk_norm is not False and core in ("full", "top1_exact"),
        itertools.product(CORES, (None, True, False)),
    ),
)
def test_qk_norm_works_with_every_core_of_the_shell(core, qk_norm):
    """With QK norm, a larger query projection changes nothing.

    None enables it only for the Top-1 cores.
    """
    model = support.tiny_model("rwkv7_shell", model__mixer__core=core, model__mixer__qk_norm=qk_norm)
    rng = np.random.default_rng(0)
    # The first layer, drawn here: compiling the initial values would dominate the test's time.
    shapes = model.shapes["blocks"]["0"]
    params = jax.tree.map(lambda x: jnp.asarray(0.4 * rng.standard_normal(x.shape[1:]), jnp.float32), shapes)
    x_BTD = jnp.asarray(rng.standard_normal((2, 23, 32), np.float32))

    @jax.jit
    def apply(factor):
        mixer = params["mixer"]
        core = {**mixer["core"], "q": {"w": factor * mixer["core"]["q"]["w"]}}
        bound = model.blocks["0"].bind({**params, "mixer": {**mixer, "core": core}}).mixer
        return bound(x_BTD), *bound.queries_and_keys(x_BTD)

    (y_BTD, q_BTHK, _), (scaled_BTD, scaled_BTHK, _) = apply(1.0), apply(3.0)
    is_on = core.startswith("top1") if qk_norm is None else qk_norm
    assert ("q_norm" in params["mixer"]["core"]) == is_on
    assert np.allclose(scaled_BTHK, (1 if is_on else 3) * q_BTHK, rtol=1e-3)
    assert np.allclose(scaled_BTD, y_BTD, rtol=1e-3, atol=1e-3) == is_on
