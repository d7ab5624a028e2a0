"""What RWKV-7 has beside the contract: its initialisers, and the first layer's values on their way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.nn.initializers import orthogonal
from tests import support


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_orthogonal(shape):
    w = np.asarray(jax.jit(lambda key: orthogonal(0.5)(key, shape, jnp.float32))(jax.random.key(0)))
    gram = w @ w.T if shape[0] < shape[1] else w.T @ w
    gain = 0.5 * max(1, (shape[1] / shape[0]) ** 0.5)
    np.testing.assert_allclose(gram, gain**2 * np.eye(min(shape)), atol=1e-6)


def test_the_first_layers_values_reach_the_second():
    """The first layer's own v-LoRA does nothing, its values move the second layer's."""
    model = support.tiny_model("rwkv7")
    weights, tokens = support.random_params(model), support.random_tokens((2, 9))
    mixer = weights["blocks"]["0"]["mixer"]

    def loss(bias):  # of this parameter alone, as the others' gradients take seconds to compile
        with_bias = {**mixer, "v_lora": {**mixer["v_lora"], "bias": bias}}
        block = {**weights["blocks"]["0"], "mixer": with_bias}
        return jnp.sum(model.logits({**weights, "blocks": {**weights["blocks"], "0": block}}, tokens) ** 2)

    share = np.abs(np.asarray(jax.jit(jax.grad(loss))(mixer["v_lora"]["bias"]))).max(-1)
    assert share[0] == 0
    assert share[1] > 0
