"""The index loss: both backends against float64, gradients, and limits."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels_pallas as kp
from kernels_pallas.index_loss import api, reference, xla
from kernels_pallas.triton import interpreter, runtime
from seqjax import mixers
from seqjax.nn.params import Template
from tests import extras, support
from tests.kernels.common import TOLERANCE, assert_close, assert_trees_close, count_primitive, fast_jit


class Case(NamedTuple):
    """Sizes; `n` chosen blocks of `C` keys."""

    T: int
    C: int = 8
    n: int = 2
    G: int = 2
    R: int = 2
    K: int = 8
    N: int = 6
    B: int = 2
    gain: float = 1.0  # of the queries


# The interpreter has tiles of 16 rows and 16 keys, and segments of 32 rows.
CASES = [
    Case(37, B=1),
    Case(50, C=20, n=1, G=1, R=3, N=16),  # two pieces of a block
    Case(5, n=1),  # one block
    Case(21, C=3, n=6, R=1, B=1, gain=8.0),
    Case(40, C=5, n=4, G=3, K=20, N=24, B=1),
]


def draw(case: Case, dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """Draw the operands; chosen blocks are in any order, and a twelfth of them is missing."""
    rng = np.random.default_rng(seed)
    B, T, G = case.B, case.T, case.G
    sizes = [(G, case.N), (case.N,), (G * case.R, case.K), (G, case.K)]
    arrays = [rng.normal(size=(B, T, *size)) for size in sizes]
    arrays = [jnp.asarray(x * (case.gain if i in (0, 2) else 1), dtype) for i, x in enumerate(arrays)]
    sel = np.full((B, T, G, case.n), -1, np.int32)
    for b, t, g in np.ndindex(B, T, G):
        past = rng.permutation(t // case.C)[: case.n]
        sel[b, t, g, : len(past)] = np.where(rng.random(len(past)) < 1 / 12, -1, past)
    return *arrays, jnp.asarray(sel)


def results(f: Any, operands: Any, wide: bool = False) -> tuple[np.ndarray, ...]:
    """Return the loss and the gradients of index queries, index keys, queries and keys, times 7."""
    with jax.enable_x64(wide):
        if wide:
            operands = [x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands]

        @fast_jit
        def run(*operands):
            loss, pull = jax.vjp(lambda *x: f(*x, operands[4]), *operands[:4])
            return loss, *pull(jnp.asarray(7, loss.dtype))

        return tuple(np.asarray(x, np.float64) for x in run(*operands))


def assert_right(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...], dtype: str) -> None:
    """Compare the loss, and gradients at their scales; the attention receives none."""
    assert abs(got[0] - want[0]) <= TOLERANCE[dtype] * max(1, abs(want[0]))
    for name, g, w in zip(("dq", "dk"), got[1:3], want[1:3], strict=True):
        size = np.abs(w).max()
        assert_close(g / size, w / size, dtype, name)
    assert not got[3].any() and not got[4].any()


def both(case: Case, implementation: str, dtype: str = "float32") -> tuple[Any, Any]:
    operands = draw(case, dtype)
    options = {"block_size": case.C}
    got = results(partial(kp.index_loss, implementation=implementation, **options), operands)
    return got, results(partial(reference.index_loss, **options), operands, wide=True)


@pytest.mark.parametrize(
    "case", support.slow_unless(lambda case: case in CASES[:2], [(case,) for case in CASES]), ids=str
)
def test_equals_double_precision(implementation, case) -> None:
    assert_right(*both(case, implementation), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(implementation, dtype) -> None:
    assert_right(*both(CASES[0], implementation, dtype), dtype)


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_xla_in_groups_of_queries(monkeypatch, dtype) -> None:
    """37 queries are nine groups in parts of three, and a shorter group."""
    monkeypatch.setattr(xla, "GROUP", 4)
    operands, options = draw(CASES[0]), {"block_size": CASES[0].C}
    wide = dtype == "float64"
    got = results(partial(kp.index_loss, implementation="xla", **options), operands, wide=wide)
    assert_right(got, results(partial(reference.index_loss, **options), operands, wide=True), dtype)


@pytest.mark.slow
def test_under_vmap_equals_a_loop(implementation) -> None:
    case = CASES[0]
    each = [draw(case, seed=seed) for seed in range(2)]
    stacked = [jnp.stack(x) for x in zip(*each, strict=True)]
    f = partial(kp.index_loss, block_size=case.C, implementation=implementation)
    run = jax.value_and_grad(f, (0, 1))
    want = jax.tree.map(lambda *x: jnp.stack(x), *(fast_jit(run)(*operands) for operands in each))
    jax.tree.map(partial(assert_close, dtype="float32"), fast_jit(jax.vmap(run))(*stacked), want)


def test_rematerialisation_computes_the_gradients_once(implementation) -> None:
    """The value without a gradient writes none."""
    operands = draw(CASES[2])
    calls: list[bool] = []
    kernels: Any = next(b for b in api.BACKENDS if b.name == implementation).load()

    class Counted(NamedTuple):
        @staticmethod
        def run(*operands, block_size, with_gradients):
            calls.append(with_gradients)
            return kernels.run(*operands, block_size=block_size, with_gradients=with_gradients)

    def loss(index_q, index_k):
        return api._loss(*(2 * index_q, index_k, *operands[2:]), Counted(), CASES[2].C)

    saved = jax.checkpoint_policies.save_only_these_names("index_gradients")
    jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=saved)))(*operands[:2])
    assert count_primitive(jaxpr.jaxpr, "log") == count_primitive(
        jax.make_jaxpr(jax.grad(loss))(*operands[:2]).jaxpr, "log"
    )
    calls.clear()
    jax.eval_shape(loss, *operands[:2])
    assert calls == [False]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        # With the tests' import hook, annotations reject a bad shape before the function does.
        ({0: jnp.zeros((2, 5, 3, 6))}, r"index_q_BTGN must begin with \(2, 5, 2\)|Type-check"),
        ({1: jnp.zeros((2, 5, 7))}, r"index_k_BTN must begin with \(2, 5, 6\)|Type-check"),
        ({4: jnp.zeros((2, 4, 2, 1), jnp.int32)}, r"sel_BTGn must begin with \(2, 5, 2\)|Type-check"),
    ],
)
def test_mismatched_shapes_are_named(wrong, match) -> None:
    operands = [wrong.get(i, x) for i, x in enumerate(draw(CASES[2]))]
    with pytest.raises(Exception, match=match):
        kp.index_loss(*operands, block_size=8)


def test_double_precision_is_refused_by_triton() -> None:
    with jax.enable_x64(True):
        *operands, sel = draw(CASES[2])
        operands = [*(x.astype(jnp.float64) for x in operands), sel]
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton kernels need|Triton's)"):
            kp.index_loss(*operands, block_size=8, implementation="triton")


def plain(index_q, index_k, q, k, sel, *, C, n_terms, with_gradients):
    """Return the results of the kernels for a device's share."""

    def one(*operands):
        *operands, sel = (x[None] for x in operands)
        share = math.prod(operands[0].shape[:3]) / n_terms
        return share * reference.index_loss(*operands, sel, block_size=C)

    if not with_gradients:
        return (jax.vmap(one)(index_q, index_k, q, k, sel),)
    loss_B, gradients = jax.vmap(jax.value_and_grad(one, (0, 1)))(index_q, index_k, q, k, sel)
    return loss_B, *gradients


@pytest.mark.parametrize("axes", [("data", "tensor"), pytest.param(("data", None), marks=pytest.mark.slow)])
def test_every_device_works_on_its_share(monkeypatch, axes) -> None:
    """On two axes of devices, array code replaces the kernels; the only collectives are sums."""
    launches = extras.triton_module("index_loss.triton.loss")
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, here are {jax.device_count()}")
    shapes = []
    monkeypatch.setattr(launches, "_run", lambda *x, **y: shapes.append([a.shape for a in x]) or plain(*x, **y))
    monkeypatch.setattr(interpreter, "is_chosen", lambda: False)
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    operands = draw(Case(21, G=2, R=2, B=4))
    f = jax.value_and_grad(partial(kp.index_loss, block_size=8, implementation="triton"), (0, 1))
    want = fast_jit(f)(*operands)
    batch, heads = axes
    specs = [P(batch, None, heads), P(batch), P(batch, None, heads), P(batch, None, heads), P(batch, None, heads)]
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    shapes.clear()
    with jax.set_mesh(mesh):
        compiled = fast_jit(lambda *x: f(*x)).lower(*split).compile()
    assert_trees_close(compiled(*split), want, atol=1e-6)
    assert [shape[0] for shape in shapes[-1]] == [2] * 5
    assert shapes[-1][0][2] == (1 if heads else 2)
    program = str(compiled.as_text())
    assert "all-reduce" in program
    assert not [kind for kind in ("all-gather", "all-to-all", "collective-permute") if kind in program]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["triton"])
def test_mixer_and_its_loss_match_xla(implementation) -> None:
    """Choice, attention with a shared selection, and loss."""
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 23, 16)), jnp.float32)

    def values_and_gradients(implementation):
        options = {"heads": 4, "kv_heads": 2, "block_size": 4, "blocks": 3, "implementation": implementation}
        template = Template(lambda rngs, _: mixers.MSA(16, **options, rngs=rngs))

        def objective(params, x_BTD):
            y_BTD, loss = template.bind(params).call_with_loss(x_BTD)
            return jnp.sum(jnp.sin(y_BTD)) + loss, loss

        run = jax.value_and_grad(objective, (0, 1), has_aux=True)
        return fast_jit(run)(template.init(jax.random.key(0)), x_BTD)

    got = values_and_gradients(implementation)
    assert kp.backends_used()["index_loss"] == implementation
    jax.tree.map(partial(assert_close, dtype="float32"), got, values_and_gradients("xla"))
