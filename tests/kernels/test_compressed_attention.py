"""The compressed attention: both backends against float64, the choice, gradients, and limits."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels_pallas as kp
from kernels_pallas.compressed_attention import reference, xla
from kernels_pallas.triton import interpreter, runtime
from tests import extras, support
from tests.kernels.common import NAMES, assert_close, assert_trees_close, count_primitive, fast_jit


class Case(NamedTuple):
    """Sizes; `n` chosen blocks of `C` keys, R query heads for each of G key heads."""

    T: int
    C: int = 4
    n: int = 3
    G: int = 2
    R: int = 2
    K: int = 8
    V: int = 8
    B: int = 2
    gain: float = 1.0  # of the queries

    @property
    def options(self) -> dict[str, Any]:
        return {"block_size": self.C, "top_k": self.n}


# The interpreter has tiles of 16 queries and 16 blocks.
CASES = [
    Case(37, B=1),
    Case(70, C=3, n=5, R=3, V=6, B=1, gain=3.0),  # two tiles of blocks
    Case(70, C=1, n=7, G=1, R=1, K=20, V=24, B=1),  # five
    Case(21, C=20, n=1, G=3, R=1),  # one block, longer than a tile of queries
    Case(64, C=4, n=20, G=1, R=4, K=20, gain=8.0),  # all past blocks are chosen
]


def draw(case: Case, dtype: str = "float32", seed: int = 0) -> tuple[jax.Array, ...]:
    """Draw queries in `dtype`, and float32 means."""
    rng = np.random.default_rng(seed)
    sizes = [(case.T, case.G * case.R, case.K), *((case.T // case.C, case.G, dim) for dim in (case.K, case.V))]
    q, *means = (rng.normal(size=(case.B, *size)) for size in sizes)
    return jnp.asarray(case.gain * q, dtype), *(jnp.asarray(x, jnp.float32) for x in means)


def results(f: Any, operands: Any, wide: bool = False) -> tuple[np.ndarray, ...]:
    """Return the attention, the gradients of queries and means, and the choice."""
    with jax.enable_x64(wide):
        if wide:
            operands = [x.astype(jnp.float64) for x in operands]

        @fast_jit
        def run(*operands):
            o_BTHV, pull, sel_BTGn = jax.vjp(f, *operands, has_aux=True)
            do_BTHV = np.random.default_rng(1).normal(size=o_BTHV.shape).astype(np.float32)
            return o_BTHV, *pull(jnp.asarray(do_BTHV, o_BTHV.dtype)), sel_BTGn

        return tuple(np.asarray(x, np.float64) for x in run(*operands))


def assert_right(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...], dtype: str) -> None:
    """Compare each array at its scale; the choice is equal, because float32 scores decide it."""
    for name, g, w in zip(("o", "dq", "dk", "dv"), got[:4], want[:4], strict=True):
        size = max(np.abs(w).max(), 1e-3)
        assert_close(g / size, w / size, dtype, name)
    np.testing.assert_array_equal(got[4], want[4])


def both(case: Case, implementation: str, dtype: str = "float32") -> tuple[Any, Any]:
    operands = draw(case, dtype)
    got = results(partial(kp.compressed_attention, implementation=implementation, **case.options), operands)
    return got, results(partial(reference.compressed_attention, **case.options), operands, wide=True)


@pytest.mark.parametrize(
    "case", support.slow_unless(lambda case: case in CASES[:2], [(case,) for case in CASES]), ids=str
)
def test_equals_double_precision(implementation, case) -> None:
    assert_right(*both(case, implementation), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", support.slow_unless(lambda case: case == CASES[0], [(case,) for case in CASES[:2]]), ids=str
)
def test_half_precision(implementation, case, dtype) -> None:
    """Scores are exact for 16-bit queries, so the choice equals that of float64."""
    assert_right(*both(case, implementation, dtype), dtype)


@pytest.mark.parametrize("piece", support.slow_unless(lambda piece: piece == 5, [1, 5, 37]))
def test_piece_size_does_not_change_the_result(monkeypatch, piece) -> None:
    case = CASES[0]
    operands, f = draw(case), partial(kp.compressed_attention, implementation="xla", **case.options)
    want = results(f, operands)
    monkeypatch.setattr(xla, "PIECE", piece)
    assert_right(results(f, operands), want, "float32")


def test_positions_continue_a_sequence() -> None:
    case = CASES[0]
    q, *means = draw(case)
    f = partial(kp.compressed_attention, **case.options)
    want = fast_jit(f)(q, *means)
    got = fast_jit(f)(q[:, 20:], *means, jnp.arange(20, case.T))
    assert_trees_close(got, tuple(x[:, 20:] for x in want), atol=1e-6)
    with pytest.raises(kp.BackendError, match=r"triton: (its queries have the positions|Triton kernels need|Triton's)"):
        f(q, *means, jnp.arange(case.T), implementation="triton")


@pytest.mark.parametrize("tiles", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ties_go_to_the_lowest_block(implementation, tiles) -> None:
    """Equal means have equal weights; the first block and the block before the local block come first."""
    T = tiles * 15 * 2
    q, means = jnp.ones((1, T, 2, 8)), jnp.ones((1, T // 2, 1, 8))
    options: Any = {"block_size": 2, "top_k": 5, "implementation": implementation}
    _, sel = fast_jit(partial(kp.compressed_attention, **options))(q, means, means)
    for t in range(T):
        order = list(dict.fromkeys([0, t // 2 - 1, *range(1, t // 2)]))[: min(5, t // 2)] if t > 1 else []
        np.testing.assert_array_equal(sel[0, t, 0], order + [-1] * (5 - len(order)), str(t))


@pytest.mark.parametrize("implementation", ["triton"])
def test_the_choice_of_nan_is_a_past_block(implementation) -> None:
    """A later gather stays in bounds."""
    case = CASES[0]
    q, *means = draw(case)
    _, sel = kp.compressed_attention(q * jnp.nan, *means, implementation=implementation, **case.options)
    assert ((sel >= -1) & (sel < jnp.maximum(jnp.arange(case.T) // case.C, 1)[:, None, None])).all()


def test_without_a_block_the_result_is_zero() -> None:
    q, means = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 0, 2, 8))
    o, sel = kp.compressed_attention(q, means, means, block_size=8, top_k=3)
    assert o.shape == q.shape
    assert not o.any()
    np.testing.assert_array_equal(sel, np.full((2, 5, 2, 1), -1))


@pytest.mark.slow
def test_under_vmap_equals_a_loop(implementation) -> None:
    case = CASES[0]
    each = [draw(case, seed=seed) for seed in range(2)]
    stacked = [jnp.stack(x) for x in zip(*each, strict=True)]
    run = partial(gradients, case, implementation)
    want = jax.tree.map(lambda *x: jnp.stack(x), *(fast_jit(run)(*operands) for operands in each))
    assert_trees_close(fast_jit(jax.vmap(run))(*stacked), want, atol=1e-5)


def gradients(case: Case, implementation: str, *operands: jax.Array) -> Any:
    """Return the choice and the gradients of a function of the attention."""

    def loss(*operands):
        o, sel = kp.compressed_attention(*operands, implementation=implementation, **case.options)
        return jnp.sin(o).sum(), sel

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*operands)


@pytest.mark.parametrize("implementation", ["triton"])
def test_rematerialisation_repeats_no_forward_kernel(implementation) -> None:
    case = CASES[0]
    operands = draw(case)

    def calls(policy):
        def layer(*operands):
            o, sel = kp.compressed_attention(*operands, implementation=implementation, **case.options)
            return o, checkpoint_name(sel, "top1_selection")

        def loss(*operands):
            o, sel = jax.checkpoint(layer, policy=policy)(*operands)
            return (jnp.sin(o) * sel.sum()).sum()

        return count_primitive(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*operands).jaxpr, "custom_vmap_call")

    names = jax.checkpoint_policies.save_only_these_names
    assert (calls(names(*NAMES)), calls(names("none"))) == (2, 3)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        # With the tests' import hook, annotations reject a bad shape before the function does.
        ({"k": (2, 9, 2, 6)}, r"k_mean_BcGK must be|Type-check"),
        ({"v": (2, 8, 2, 8)}, r"v_mean_BcGV begin with|Type-check"),
        ({"k": (2, 9, 3, 8), "v": (2, 9, 3, 8)}, "cannot share 3"),
        ({"block_size": 0}, "chunk_size must be at least 1"),
        ({"top_k": 0}, "top_k must be at least 1"),
    ],
    ids=str,
)
def test_mismatched_operands_are_named(wrong, match) -> None:
    k, v = (jnp.zeros(wrong.get(name, (2, 9, 2, 8))) for name in ("k", "v"))
    options: Any = {"block_size": 4, "top_k": 3} | {name: x for name, x in wrong.items() if name not in ("k", "v")}
    with pytest.raises(Exception, match=match):
        kp.compressed_attention(jnp.zeros((2, 37, 4, 8)), k, v, **options)


def test_double_precision_is_refused_by_triton() -> None:
    case = CASES[0]
    with jax.enable_x64(True):
        operands = [x.astype(jnp.float64) for x in draw(case)]
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton kernels need|Triton's)"):
            kp.compressed_attention(*operands, implementation="triton", **case.options)


def plain_forward(q, k, v, *, C, top_k):
    """Return the results of the forward kernel by array code."""
    o, sel = reference.compressed_attention(q, k, v, block_size=C, top_k=top_k)
    return o, jnp.zeros(q.shape[:3]), sel


def plain_backward(q, k, v, o, lse, do, *, C):
    """Return the results of the backward kernels by array code."""
    del o, lse
    return jax.vjp(lambda *x: reference.compressed_attention(*x, block_size=C, top_k=1)[0], q, k, v)[1](do)


@pytest.mark.parametrize("axes", [("data", "tensor"), pytest.param(("data", None), marks=pytest.mark.slow)])
def test_every_device_works_on_its_share(monkeypatch, axes) -> None:
    """On two axes of devices, array code replaces the kernels; the gradients need no exchange."""
    launches = extras.triton_module("compressed_attention.triton.attention")
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, here are {jax.device_count()}")
    shapes = []

    def recorded(f):
        return lambda *x, **y: shapes.append([a.shape for a in x]) or f(*x, **y)

    monkeypatch.setattr(launches, "_forward", recorded(plain_forward))
    monkeypatch.setattr(launches, "_backward", recorded(plain_backward))
    monkeypatch.setattr(interpreter, "is_chosen", lambda: False)
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    case = Case(21, B=4)
    operands = draw(case)
    f = partial(gradients, case, "triton")
    want = fast_jit(f)(*operands)
    batch, heads = axes
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = [jax.device_put(x, NamedSharding(mesh, P(batch, None, heads))) for x in operands]
    shapes.clear()
    with jax.set_mesh(mesh):
        compiled = fast_jit(lambda *x: f(*x)).lower(*split).compile()
    assert_trees_close(compiled(*split), want, atol=1e-5)
    assert {shape[0] for shape in shapes[-1]} == {2}
    assert shapes[-1][1][2] == (1 if heads else 2)
    program = str(compiled.as_text())
    assert not [kind for kind in ("all-gather", "all-to-all", "collective-permute") if kind in program]
