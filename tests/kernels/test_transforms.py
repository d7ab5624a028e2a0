"""The kernels under jit, vmap, scan and sharding.

They run on four CPU devices or on the available GPUs.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels_pallas as kp
from kernels_pallas import mosaic_gpu, selective_scan, ssd, state_scan
from kernels_pallas.batching import partitioned
from kernels_pallas.triton import interpreter
from tests import support
from tests.kernels.common import KERNELS, NAMES, ON_GPU, OPS, Shape, assert_trees_close, fast_jit, qkv, with_grads

XLA = ("exact-masked", "approx-sorted", "element")


@pytest.fixture(
    # Covers both selections and both schedules; the interpreter takes seconds per other case.
    params=support.slow_unless(lambda name: ON_GPU or name in XLA, [*XLA, *KERNELS])
)
def op(request: pytest.FixtureRequest):
    return (OPS | KERNELS)[request.param]


def test_vmap_equals_a_loop(op) -> None:
    q, k, v = (jnp.stack(x) for x in zip(*(qkv(Shape(T=20), seed=s) for s in range(2)), strict=True))
    got = fast_jit(jax.vmap(with_grads(op)))(q, k, v)
    one = fast_jit(with_grads(op))
    want = [one(q[i], k[i], v[i]) for i in range(2)]
    assert_trees_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


@pytest.mark.parametrize(
    "op",
    support.slow_unless(lambda name: ON_GPU or name in ("exact-masked", "element"), [*XLA, *KERNELS]),
    indirect=True,
)
def test_scan_over_layers_with_remat(op) -> None:
    """Three scanned and rematerialised residual layers equal three calls."""
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


class Case(NamedTuple):
    """A call `f(*arrays)` with the sharding of arrays and results.

    B and H are split. With `has_grads`, gradients are compared as well.
    """

    f: Callable
    arrays: tuple[jax.Array, ...]
    specs: tuple[str, ...]
    out_specs: tuple[str, ...]
    has_grads: bool = True


def spec_of(dims: str) -> P:
    return P(*({"B": "data", "H": "tensor"}.get(dim) for dim in dims.split()))


def attention(name: str) -> Case:
    return Case((OPS | KERNELS)[name], qkv(Shape(B=2, T=20)), ("B T H K",) * 3, ("B T H V",))


def select(selection: str, implementation: str, *, top_k: int = 1) -> Case:
    is_pallas = implementation == "pallas"  # pallas has larger tiles
    q, k, _ = qkv(Shape(B=2, T=200, K=64), dtype="bfloat16") if is_pallas else qkv(Shape(B=2, T=20))
    options = {"chunk_size": 64 if is_pallas else 8, "selection": selection, "implementation": implementation}
    if selection == "shortlist":
        options |= {"chunk_size": 4, "shortlist": 2}
    f, out = partial(kp.select_chunk, top_k=top_k, **options), "B T H" if top_k == 1 else "B T H k"
    return Case(f, (q, k), ("B T H K",) * 2, (out,), has_grads=False)


def decode(kind: str, implementation: str, *, top_k: int = 1) -> Case:
    q, k, v = qkv(Shape(B=2, T=20))
    arrays = (q[:, -1], k, v, jnp.int32(19))
    if kind == "element":
        f = partial(kp.top1_element_decode, implementation=implementation)
        return Case(f, arrays, ("B H K", "B T H K", "B T H V", ""), ("B H V",), has_grads=False)
    options = {"chunk_size": 8, "selection": kind, "top_k": top_k, "implementation": implementation}
    if kind == "shortlist":
        options |= {"chunk_size": 4, "shortlist": 2}
        arrays = (*arrays, kp.chunk_table(k, chunk_size=4, table="mean"))
        f = lambda q, k, v, length, table: kp.top1_chunk_decode(q, k, v, length, chunk_table_BcGPK=table, **options)  # noqa: E731
        return Case(f, arrays, ("B H K", "B T H K", "B T H V", "", "B c H P K"), ("B H V",), has_grads=False)
    return Case(
        lambda q, k, v, length, mean: kp.top1_chunk_decode(q, k, v, length, chunk_mean_BcGK=mean, **options),
        (*arrays, kp.chunk_means(k, chunk_size=8)),
        ("B H K", "B T H K", "B T H V", "", "B c H K"),
        ("B H V",),
        has_grads=False,
    )


def states(implementation: str) -> Case:
    rng = np.random.default_rng(0)
    shapes = [(3, 2, 4, 8), (3, 2, 4, 8, 8), (3, 2, 4, 8, 5), (2, 4, 8, 5)]
    decay, p, r, s = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    f = partial(state_scan, precision=jax.lax.Precision.HIGHEST, implementation=implementation)
    specs = ("c B H K", "c B H K K", "c B H K V", "B H K V")
    return Case(f, (jax.nn.sigmoid(decay), p / 8, r, s), specs, specs[2:])


def channels(implementation: str) -> Case:
    rng = np.random.default_rng(0)
    shapes = [(2, 12, 8), (2, 12, 8), (8, 4), (2, 12, 4), (2, 12, 4), (8,), (2, 8, 4)]
    x, dt, a, b, c, d, h = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    f = partial(selective_scan, implementation=implementation)
    specs = ("B T H", "B T H", "H N", "B T N", "B T N", "H", "B H N")
    return Case(f, (x, jax.nn.softplus(dt), -jnp.exp(a), b, c, d, h), specs, ("B T H", "B H N"))


def duality(kind: str, implementation: str) -> Case:
    rng = np.random.default_rng(0)
    bc, dims = ((2, 36, 4, 5), "B T H N") if kind == "per head" else ((2, 36, 5), "B T N")
    shapes = [(2, 36, 4, 8), (2, 36, 4), bc, bc, (2, 4, 5, 8), (2, 36, 4)]
    x, log_a, b, c, state, dt = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    f = partial(ssd, chunk_size=16, implementation=implementation)
    specs = ("B T H V", "B T H", dims, dims, "B H N V", "B T H")
    arrays = (x / 4, -jax.nn.softplus(log_a), b / 4, c / 4, state, jax.nn.softplus(dt))
    return Case(f, arrays, specs, ("B T H V", "B H N V"))


SHARDED = {
    **{name: partial(attention, name) for name in ("exact-masked", "approx-sorted", "element", *KERNELS)},
    **{
        f"{name}-{by}": partial(make, *arguments, by)
        for by in ("xla", "triton")
        for name, make, arguments in (
            ("select-exact", select, ("exact",)),
            ("select-best-key", select, ("best_key",)),
            ("select-approx", select, ("approx",)),
            ("select-several", partial(select, top_k=2), ("approx",)),
            ("select-several-exact", partial(select, top_k=2), ("exact",)),
            ("select-shortlist", partial(select, top_k=2), ("shortlist",)),
            ("decode-exact", decode, ("exact",)),
            ("decode-best-key", decode, ("best_key",)),
            ("decode-approx", decode, ("approx",)),
            ("decode-several", partial(decode, top_k=2), ("exact",)),
            ("decode-shortlist", decode, ("shortlist",)),
            ("decode-element", decode, ("element",)),
            ("state-scan", states, ()),
            ("selective-scan", channels, ()),
            ("ssd", duality, ("shared",)),
            ("ssd-per-head", duality, ("per head",)),
        )
    },
    "select-exact-pallas": partial(select, "exact", "pallas"),
}
# Batch x heads: two GPUs can only split one of them.
MESHES = [(2, 2)] if jax.device_count() >= 4 else [(2, 1), (1, 2)]


@pytest.fixture(params=MESHES, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    n_devices = math.prod(request.param)
    if jax.device_count() < n_devices:
        pytest.skip("needs two devices")
    axes, devices = ("data", "tensor"), jax.devices()[:n_devices]
    return jax.make_mesh(request.param, axes, axis_types=(AxisType.Auto,) * 2, devices=devices)


def with_case_grads(f: Callable, case: Case) -> Callable:
    def loss(*arrays):
        out = f(*arrays)
        return sum((x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(out)), out

    if not case.has_grads:
        return fast_jit(f)
    return fast_jit(jax.value_and_grad(loss, argnums=range(len(case.arrays)), has_aux=True))


@cache  # baseline for both ways of sharding
def on_one_device(name: str) -> tuple[Case, Any]:
    case = SHARDED[name]()
    return case, jax.tree.map(np.asarray, with_case_grads(case.f, case)(*case.arrays))


def marks_of(name: str, how: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return a case's marks: most cases are slow.

    The interpreter runs on one device, so two kernels, one with a gradient, are enough there. In shard_map an op runs
    as on one device, so an attention and a scan are enough.
    """
    if "pallas" in name:
        return (pytest.mark.gpu,)
    quick = ("exact-triton", "select-exact-triton")
    if "triton" not in name:
        quick = (name,) if how == "automatic" else ("element", "selective-scan-xla")
        if name.startswith("ssd"):  # test_scans_on_meshes.py covers ssd
            quick = ()
    return () if name in quick else (pytest.mark.slow,)


@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param(name, how, marks=marks_of(name, how)) for name in SHARDED for how in ("shard_map", "automatic")],
)
def test_sharded_over_batch_and_heads(name, how, mesh) -> None:
    """Values and gradients match one device and stay sharded."""
    if "pallas" in name and (refusal := mosaic_gpu.refusal("gpu")):
        pytest.skip(refusal)
    case, want = on_one_device(name)
    specs, out_specs = ([spec_of(dims) for dims in side] for side in (case.specs, case.out_specs))
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(case.arrays, specs, strict=True)]
    f = case.f
    if how == "shard_map":
        results = tuple(out_specs) if len(out_specs) > 1 else out_specs[0]
        f = jax.shard_map(f, mesh=mesh, in_specs=tuple(specs), out_specs=results)
    with jax.set_mesh(mesh):
        got = with_case_grads(f, case)(*arrays)
    # The interpreter runs on one device, which receives all data.
    if how == "shard_map" or not (interpreter.is_chosen() and "triton" in name):
        out, wanted = (got[0][1], got[1]) if case.has_grads else (got, ()), (*out_specs, *specs)
        for x, spec in zip(jax.tree.leaves(out), wanted, strict=False):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    assert_trees_close(got, want)


@pytest.mark.parametrize("R", [1, 2])
def test_partitioned_calls_work_on_their_share(R, mesh) -> None:
    """Wrap a function that XLA could not split by itself, as the kernels are wrapped."""
    shares = []

    def f(q_BTHK, k_BTGK, *, factor):
        assert factor == 1
        shares.append((q_BTHK.shape, k_BTGK.shape))
        k_BTHK = jnp.repeat(jnp.sort(k_BTGK, axis=1), q_BTHK.shape[2] // k_BTGK.shape[2], axis=2)
        y_BTHK = q_BTHK * jnp.cumsum(k_BTHK, axis=1)
        return y_BTHK, k_BTGK.sum(3), y_BTHK[..., :3]

    rule = "b t (g r) k, b t g k -> b t (g r) k, b t g, b t (g r) n"  # a result may have dims that no operand has

    q, k, _ = qkv(Shape(B=2, T=20, R=R, G=2))
    f = partial(f, factor=1)
    want = f(q, k)
    spec = P("data", None, "tensor", None)
    q, k = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k))
    got = fast_jit(partitioned(f, rule, g=2, r=R))(q, k)
    B, G = 2 // mesh.shape["data"], 2 // mesh.shape["tensor"]
    assert shares[-1] == ((B, 20, G * R, 8), (B, 20, G, 8))
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    assert got[2].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    assert_trees_close(got, want)
    q = jax.device_put(q, NamedSharding(mesh, P("data", "tensor")))  # time is never split
    got = fast_jit(partitioned(f, rule, g=2, r=R))(q, k)
    assert shares[-1][0][1] == 20
    assert_trees_close(got, want)
