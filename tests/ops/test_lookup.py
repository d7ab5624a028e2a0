"""Embedding lookup: row gradients are summed per device, then once across devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from seqjax.ops.lookup import lookup
from seqjax.sharding import copies, make_mesh
from tests.kernels.test_scans_on_meshes import collectives

B, T, D, O = 8, 6, 5, 12


@pytest.mark.skipif(jax.device_count() != 8, reason="eight devices wanted (XLA_FLAGS was given)")
@pytest.mark.parametrize(
    "sizes", [{"data": 2}, {"data": 2, "fsdp": 2}, {"seq": 2}, {"data": 2, "seq": 2, "tensor": 2}], ids=str
)
def test_gradients_of_two_uses_need_one_all_reduce(sizes):
    """Rows repeat on and across devices, and the table has a second use: the gradient equals the plain one."""
    rng = np.random.default_rng(0)
    n_devices = math.prod(sizes.values())
    mesh, pieces = make_mesh(**sizes, devices=jax.devices()[:n_devices]), n_devices // sizes.get("tensor", 1)
    table, g = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((O, D), (B, T, D)))
    tokens = jnp.asarray(rng.integers(0, O // 2, (B, T)), jnp.int32)

    def used_twice(table, tokens, g):
        table_NOD = copies(table, pieces)
        return jnp.sum(lookup(table, table_NOD, tokens) * g) + 3 * jnp.sum(table_NOD**2) / pieces

    by_token, replicated = (
        NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "seq")),
        NamedSharding(mesh, PartitionSpec()),
    )
    shardings = (replicated, by_token, by_token)
    function = jax.jit(jax.grad(used_twice), in_shardings=shardings, out_shardings=replicated)
    with jax.set_mesh(mesh):
        compiled = function.lower(table, tokens, g).compile()
        got = compiled(*(jax.device_put(x, s) for x, s in zip((table, tokens, g), shardings, strict=True)))
    want = jax.grad(lambda table: jnp.sum(table[tokens] * g) + 3 * jnp.sum(table**2))(table)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert collectives(str(compiled.as_text())) == {"all-reduce": [(O, D)]}


def test_lookup_returns_the_rows():
    table, tokens = jnp.arange(12.0).reshape(4, 3), jnp.asarray([[2, 0], [3, 3]])
    np.testing.assert_array_equal(lookup(table, table[None], tokens), table[tokens])
