"""Sequences split over devices (`mesh.seq`): one device's numbers, the collectives that it takes, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.nn import params as params_lib
from seqjax.sharding import batch_sharding, make_mesh, require_equal_pieces, shardings
from seqjax.testing import loss_and_grads
from seqjax.training.step import make_entropy_step
from tests import support
from tests.kernels.test_scans_on_meshes import collectives

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="eight devices wanted (XLA_FLAGS was given)")

B, T = 2, 24
MESHES = {"2": {"data": 1, "seq": 2}, "4": {"data": 1, "seq": 4}, "2x2x2": {"data": 1, "fsdp": 2, "seq": 2, "tensor": 2}}
# One head has nothing to share; its state could be split along values, which its kernel's rule does not do.
REFUSED = {("mamba1", "one"), ("mamba1", "one_dt"), ("mamba1", "bare"), ("top1_chunk", "approx_gqa")}
KV_HEADS = 2  # of the variants called gqa, which four devices cannot share


def mesh_of(name: str) -> jax.sharding.Mesh:
    return make_mesh(**MESHES[name], devices=jax.devices()[: int(np.prod(list(MESHES[name].values())))])


@functools.cache
def reference(mixer: str, variant: str):
    """On one device."""
    model = support.tiny_model(mixer, variant, train__seq_len=T)
    weights, tokens = support.random_params(model), support.random_tokens((B, T + 1))
    return model, weights, tokens, *loss_and_grads(model, weights, tokens)


def is_quick(mixer: str, variant: str, split: str) -> bool:
    return (mixer, variant, split) in {
        ("transformer_pp", "window", "2"),
        ("mamba2", "full", "4"),
    }


CASES = [
    (mixer, variant, split)
    for mixer, variant in support.CASES
    if (mixer, variant) not in REFUSED
    for split in MESHES
    if split != "4" or "gqa" not in variant
]


@pytest.mark.parametrize(("mixer", "variant", "split"), support.slow_unless(is_quick, CASES))
def test_losses_and_gradients_are_those_of_one_device(mixer, variant, split):
    model, weights, tokens, loss, grads = reference(mixer, variant)
    mesh = mesh_of(split)
    placed = jax.device_put(weights, shardings(mesh, model.shapes, model.axes))
    with jax.set_mesh(mesh):
        got_loss, got_grads = loss_and_grads(model, placed, jax.device_put(tokens, batch_sharding(mesh)))
    np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
    for (name, a), (_, b) in zip(params_lib.names(got_grads), params_lib.names(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()) + 1e-9, err_msg=name)
