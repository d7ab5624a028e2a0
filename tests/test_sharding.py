"""Valid and invalid meshes, and the mesh axis of each parameter axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from seqjax import sharding
from seqjax.errors import UserError
from seqjax.sharding import AXES, RULES, batch_sharding, constrain_batch, make_mesh, replicated, shardings
from tests import support

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="eight devices wanted (XLA_FLAGS was given)")


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (8, 1, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, (1, 4, 1, 2)),
        ({"seq": 4}, (2, 1, 4, 1)),
    ],
)
def test_mesh_shapes(sizes, shape):
    mesh = make_mesh(**sizes)
    assert mesh.axis_names == AXES
    assert tuple(mesh.shape.values()) == shape


@pytest.mark.parametrize(
    "sizes",
    [{"data": 3}, {"fsdp": 3}, {"data": 16}, {"data": -1, "fsdp": -1}, {"tensor": 0}, {"tensor": -2}, {"fsdp": 9}],
)
def test_meshes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(UserError, match=r"config\.mesh"):
        make_mesh(**sizes)


def test_parameters_are_split_by_their_logical_axes():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    model = support.tiny_model("transformer_pp", "gqa", model__mlp__dim=49)
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="."): s.spec
        for path, s in jax.tree_util.tree_flatten_with_path(shardings(mesh, model.shapes, model.axes))[0]
    }

    def spec(end):
        (matching,) = [s for name, s in flat.items() if name.endswith(end)]
        return matching

    assert spec("embed") == P("tensor", "fsdp")
    assert spec("mixer.q.w") == P(None, "fsdp", "tensor")
    assert spec("mixer.out.w") == P(None, "tensor", "fsdp")
    assert spec("mlp.up.w") == P(None, "fsdp", None), "49 is odd: that dimension stays whole"
    assert spec("norm1.g") == P(None, "fsdp")


def test_no_mesh_axis_is_used_twice_in_one_parameter():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert shardings(mesh, {"x": x}, {"x": ("heads", "mlp")})["x"].spec == P("tensor", None)


def test_an_axis_without_a_rule_names_add_rule():
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    with pytest.raises(UserError, match=r"'width' .*seqjax\.sharding\.add_rule\('width'"):
        shardings(make_mesh(), {"x": x}, {"x": ("width",)})


def test_user_mixers_can_add_axes(monkeypatch):
    monkeypatch.setattr(sharding, "RULES", dict(RULES))
    x, mesh = jax.ShapeDtypeStruct((4, 6, 2), jnp.float32), make_mesh(data=2, fsdp=2, tensor=2)
    for _ in range(2):  # a notebook cell may run twice
        sharding.add_rule("experts", "tensor")
        sharding.add_rule("taps", None)
    assert shardings(mesh, {"x": x}, {"x": ("experts", "embed", "taps")})["x"].spec == P("tensor", "fsdp", None)
    with pytest.raises(UserError, match=r"'experts' .*'tensor'"):
        sharding.add_rule("experts", "fsdp")
    with pytest.raises(UserError, match=r"'embed' .*'fsdp'"):
        sharding.add_rule("embed", None)
    with pytest.raises(UserError, match=r"split .*'data'"):
        sharding.add_rule("rows", "data")


def test_every_axis_of_every_mixer_has_a_rule():
    for mixer, variant in support.CASES:
        model = support.tiny_model(mixer, variant)
        leaves = jax.tree.leaves(model.axes, is_leaf=lambda a: isinstance(a, tuple))
        assert {name for axes in leaves for name in axes} <= set(RULES), mixer


def test_batches_are_split_over_data_and_fsdp():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    x = jax.device_put(np.zeros((3, 8, 5)), batch_sharding(mesh, leading=1))
    assert {s.data.shape for s in x.addressable_shards} == {(3, 2, 5)}
    assert jax.device_put(np.zeros(8), replicated(mesh)).sharding.is_fully_replicated

    @jax.jit
    def f(x):
        return constrain_batch(2 * x)

    with jax.set_mesh(mesh):
        assert f(np.ones((8, 3))).sharding.spec == P(("data", "fsdp"))
        assert (f(np.ones((5, 3))) == 2).all(), "5 rows cannot be split and need not be"
    assert (constrain_batch(jnp.ones((8, 3))) == 1).all()
