"""Memory that a layer saves for its backward pass: 16 x 2,048 tokens at size 110m, bfloat16, from shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from seqjax.config import from_config_dict, presets
from seqjax.models import Model

# In GB. Autodiff without `save_inputs` saves 1.4 (Mamba-2) to 4.2 (RWKV-7). The recurrences use the CPU implementation.
MAX_GB = {
    "mamba1": 0.87,
    "mamba2": 1.04,
    "mamba3": 1.77,
    "rwkv5": 1.29,
    "rwkv6": 1.50,
    "rwkv7": 1.88,
    "rwkv7_shell": 1.55,
}


@pytest.mark.parametrize("name", MAX_GB)
def test_layers_save_only_inputs(name):
    config = from_config_dict(presets.read_config(f"{name}:110m"))
    model = Model(dataclasses.replace(config.model, dtype="bfloat16"), max_len=2048)
    template = model.blocks["0"]

    def apply(params, x_BTD, carry):
        return template.bind(params)(x_BTD, carry, layer=jnp.int32(1), dtype=model.dtype)

    x_BTD = jax.ShapeDtypeStruct((16, 2048, model.config.dim), model.residual_dtype)
    carry = jax.eval_shape(template.bind(template.shapes).init_carry, x_BTD)
    backward = jax.eval_shape(lambda *inputs: jax.vjp(apply, *inputs)[1], template.shapes, x_BTD, carry)
    saved = [x for x in jax.tree.leaves(backward) if x.ndim > 2]
    assert 0.9 * MAX_GB[name] < sum(x.size * x.dtype.itemsize for x in saved) / 1e9 < MAX_GB[name]
