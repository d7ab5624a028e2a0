"""The kernels under jit, vmap, scan, rematerialisation and sharding, and their memory against length."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels_pallas as kp
from kernels_pallas import compat, tiles
from kernels_pallas.batching import partitioned
from kernels_pallas.top1_chunk import reference
from tests.kernels.common import Shape, count_primitive, fast_jit, qkv, temporary_bytes

CHUNK = partial(kp.top1_chunk_attention, chunk_size=8)
OPS = {
    "exact-masked": partial(CHUNK, schedule="masked"),
    "exact-sorted": partial(CHUNK, schedule="sorted"),
    "approx-sorted": partial(CHUNK, selection="approx", schedule="sorted"),
    "element": kp.top1_element_attention,
    "element-soft": partial(kp.top1_element_attention, v_grad="soft"),
}
# in the interpreter, or on a GPU (conftest.py)
KERNELS = {
    "element-triton": partial(kp.top1_element_attention, implementation="triton"),
    "exact-triton": partial(kp.top1_chunk_attention, chunk_size=8, implementation="triton"),
    "approx-triton": partial(kp.top1_chunk_attention, chunk_size=8, selection="approx", implementation="triton"),
}
NAMES = ("top1_selection", "attention_out", "attention_lse")


@pytest.fixture(params=["exact-masked", "approx-sorted", "element", *KERNELS])  # both selections, both schedules
def op(request: pytest.FixtureRequest):
    return (OPS | KERNELS)[request.param]


def is_interpreted(op) -> bool:
    """The interpreter runs on one device and is handed everything there."""
    return compat.is_interpreted() and op in KERNELS.values()


def loss_of(op):
    return lambda q, k, v: (op(q, k, v).astype(jnp.float32) ** 2).sum()


def with_grads(op):
    return jax.value_and_grad(loss_of(op), argnums=(0, 1, 2))


def assert_trees_close(got, want, atol: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol), got, want)


@pytest.mark.parametrize(("name", "saved"), [*((name, NAMES) for name in OPS), ("exact-sorted", NAMES[:1])])
def test_saved_selection_is_not_redone_and_gradients_are_the_same_bits(small_tiles, name, saved) -> None:
    op, (q, k, v) = OPS[name], qkv(Shape(T=40))
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    layers = {
        "plain": op,
        "full remat": jax.checkpoint(op),
        "saved": jax.checkpoint(op, policy=policy),
    }
    selections = {
        name: count_primitive(jax.make_jaxpr(with_grads(layer))(q, k, v).jaxpr, "argmax")
        for name, layer in layers.items()
    }
    assert selections["plain"] == 1
    assert selections["full remat"] == 2
    assert selections["saved"] == 1
    want = fast_jit(with_grads(layers["plain"]))(q, k, v)
    got = fast_jit(with_grads(layers["saved"]))(q, k, v)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_rematerialised_give_the_same_bits(name) -> None:
    """Saving the residuals by name leaves the backward kernels alone; without, the forward ones run twice."""
    op, (q, k, v) = KERNELS[name], qkv(Shape(T=40, B=1))
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)
    layers = (op, jax.checkpoint(op, policy=policy), jax.checkpoint(op))
    calls = [count_primitive(jax.make_jaxpr(with_grads(layer))(q, k, v).jaxpr, "custom_vmap_call") for layer in layers]
    assert calls[0] == calls[1] < calls[2]
    want, *others = (fast_jit(with_grads(layer))(q, k, v) for layer in layers)
    for got in others:
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_saving_all_names_leaves_only_the_backward_pass(small_tiles) -> None:
    q, k, v = qkv(Shape(T=40))
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)
    for op in (OPS["exact-masked"], OPS["element"]):
        plain, saved = (
            count_primitive(jax.make_jaxpr(with_grads(layer))(q, k, v).jaxpr, "dot_general")
            for layer in (op, jax.checkpoint(op, policy=policy))
        )
        assert saved == plain


def test_vmap_equals_a_loop(op) -> None:
    q, k, v = (jnp.stack(x) for x in zip(*(qkv(Shape(T=20), seed=s) for s in range(3)), strict=True))
    got = fast_jit(jax.vmap(with_grads(op)))(q, k, v)
    one = fast_jit(with_grads(op))
    want = [one(q[i], k[i], v[i]) for i in range(3)]
    assert_trees_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


def test_scan_over_layers_with_remat(op) -> None:
    """Three residual layers, scanned and rematerialised, equal three calls."""
    x = qkv(Shape(T=20, R=1, V=8))[0]
    w_L = jnp.asarray([0.5, 1.0, 2.0])
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)

    def layer(x, w):
        return x + op(w * x, x, x), None

    scanned = fast_jit(jax.grad(lambda x: (jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w_L)[0] ** 2).sum()))

    @fast_jit
    @jax.grad
    def unrolled(x):
        for w in w_L:
            x, _ = layer(x, w)
        return (x**2).sum()

    want = unrolled(x)
    assert_trees_close(scanned(x), want, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("how", ["shard_map", "automatic"])
def test_sharded_over_batch_and_heads(op, how) -> None:
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    q, k, v = qkv(Shape(B=2, T=20))
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = P("data", None, "tensor", None)
    want = fast_jit(with_grads(op))(q, k, v)
    q, k, v = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v))
    if how == "shard_map":
        op = jax.shard_map(op, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    got = fast_jit(with_grads(op))(q, k, v)
    if how == "shard_map" or not is_interpreted(op):
        assert got[1][0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    assert_trees_close(got, want)


@pytest.mark.parametrize("R", [1, 2])
def test_partitioned_calls_work_on_their_share(R) -> None:
    """What kernels are wrapped in, here around something that XLA could not split by itself."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    shares = []

    def f(q_BTHK, k_BTGK, *, factor):
        assert factor == 1
        shares.append((q_BTHK.shape, k_BTGK.shape))
        k_BTHK = jnp.repeat(jnp.sort(k_BTGK, axis=1), q_BTHK.shape[2] // k_BTGK.shape[2], axis=2)
        return q_BTHK * jnp.cumsum(k_BTHK, axis=1), k_BTGK.sum(3)

    rule = "b t (g r) k, b t g k -> b t (g r) k, b t g"

    q, k, _ = qkv(Shape(B=2, T=20, R=R, G=2))
    f = partial(f, factor=1)
    want = f(q, k)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spec = P("data", None, "tensor", None)
    q, k = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k))
    got = fast_jit(partitioned(f, rule, g=2, r=R))(q, k)
    assert shares[-1] == ((1, 20, R, 8), (1, 20, 1, 8))
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    assert_trees_close(got, want)
    q = jax.device_put(q, NamedSharding(mesh, P("data", "tensor")))  # time is never split
    got = fast_jit(partitioned(f, rule, g=2, r=R))(q, k)
    assert shares[-1][0][1] == 20
    assert_trees_close(got, want)


@pytest.mark.parametrize("name", ["exact-masked", "approx-sorted", "element"])
def test_memory_grows_linearly_with_length(name, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", {})
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_DEFAULT", 2**14)  # a tile of scores is small beside q, k, v

    def growth(op) -> list[float]:
        sizes = [
            temporary_bytes(with_grads(op), *[jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)] * 3)
            for T in (1024, 2048, 4096)
        ]
        return [b / a for a, b in pairwise(sizes)]

    assert max(growth(OPS[name])) < 2.2
    if name == "exact-masked":  # the measure itself: the dense form is quadratic
        assert min(growth(partial(reference.top1_chunk_attention, chunk_size=8))) > 3.5


def test_second_derivatives_are_refused() -> None:
    q, k, v = qkv(Shape(T=10))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(CHUNK, (q, k, v), (q, k, v))
