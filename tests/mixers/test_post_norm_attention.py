"""The post-norm block against stored arrays of a public layer.

tests/golden/make_hybrids.py created the arrays.
"""

import importlib

import jax
import jax.numpy as jnp

from seqjax.config import from_config_dict
from seqjax.models import Model
from tests.mixers.test_golden_ssm import close, golden, tree

SETTINGS = {"heads": 2, "kv_heads": 1, "position": "rope", "rope_base": 100.0}


def test_block_matches_olmo_hybrid():
    """Attention with RoPE and a norm over all heads, and a SwiGLU, each followed by a norm."""
    config = importlib.import_module("configs.olmo_hybrid").get_config("debug,model.dim=8,model.mlp.dim=12")
    with config.ignore_type():
        config.model.mixer = {"name": "post_norm_attention", **SETTINGS}
    template = Model(from_config_dict(config).model, max_len=32).blocks["0"]
    arrays = golden("olmo_block")
    params = tree(arrays, "p.")
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, template.shapes)

    def loss(params, x_BTD):
        y_BTD, _ = template.bind(params)(x_BTD, {}, layer=jnp.int32(0), dtype=jnp.float32)
        return jnp.sum(y_BTD * arrays["weight"]), y_BTD

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, y_BTD), (grads, dx) = run(params, jnp.asarray(arrays["x"]))
    close(y_BTD, arrays["y"])
    close((grads, dx), (tree(arrays, "g."), arrays["dx"]), 5e-5)
