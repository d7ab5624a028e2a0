"""Mamba-2's recurrence, `ssd`: both backends against double precision.

Gradients are compared as well.
"""

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import backend
from kernels_pallas.ssd import reference
from kernels_pallas.ssd.triton import refusal
from kernels_pallas.triton import runtime
from seqjax.ops.ssd import ssd
from tests import extras, support
from tests.kernels.common import assert_close, fast_jit

scan = extras.triton_module("ssd.triton.scan")


def draw(B, T, H, V, N, *, decay=0.3, dtype="float32", seed=0, per_head=False) -> list[jax.Array]:
    """Draw x, log_a, b, c, dt and state."""
    rng = np.random.default_rng(seed)
    bc = (B, T, H, N) if per_head else (B, T, N)
    shapes = ((B, T, H, V), (B, T, H), bc, bc, (B, T, H), (B, H, N, V))
    x, log_a, b, c, dt, state = (rng.normal(size=shape) for shape in shapes)
    wide = (jnp.asarray(t, jnp.float32) for t in (-decay * np.exp(log_a), np.exp(dt), state))
    log_a, dt, state = wide
    x, b, c = (jnp.asarray(t, dtype) for t in (x, b, c))
    return [x, jnp.maximum(log_a, -59), b, c, dt, state]


def op(x, log_a, b, c, dt, state, *, chunk=16, implementation=None):
    options: Any = {"return_state": True, "chunk_size": chunk, "implementation": implementation}
    return ssd(x, log_a, b, c, dt_BTH=dt, initial_state=state, **options)


def oracle(x, log_a, b, c, dt, state):
    return reference.ssd(x, log_a, b, c, state, dt)


def pulled(f: Any) -> Any:
    """Return a compiled function: (arrays, cotangents) -> (f(*arrays), gradients)."""

    @fast_jit
    def run(arrays, cotangents):
        out, pull = jax.vjp(f, *arrays)
        return out, pull(cotangents)

    return run


def with_gradients(f: Any, arrays: Any, wide: bool = False) -> Any:
    """Return f(*arrays) and its gradients, for fixed random cotangents.

    In float64 if `wide`.
    """
    shapes = jax.eval_shape(f, *arrays)
    rng = np.random.default_rng(1)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    with jax.enable_x64(wide):
        if wide:
            arrays, cotangents = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (tuple(arrays), cotangents))

        return jax.tree.map(np.asarray, pulled(f)(tuple(arrays), cotangents))


def assert_trees_close(got: Any, want: Any, dtype: str) -> None:
    leaves, wanted = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
    for (path, g), (_, w) in zip(leaves, wanted, strict=True):
        assert_close(g, w, dtype, jax.tree_util.keystr(path), scale=1e-3)


# One position; less than a chunk; chunks that do not divide T, with several blocks and partial blocks; three heads in
# groups of two; decays that forget within a position, or never.
CASES = [
    ((1, 1, 2, 5, 6), 16, 0.3),
    ((2, 9, 3, 5, 6), 16, 0.3),
    ((2, 37, 3, 5, 20), 16, 0.3),
    ((1, 70, 2, 20, 5), 40, 0.3),
    ((1, 64, 1, 16, 16), 32, 0.3),
    ((1, 23, 2, 3, 4), 7, 0.3),
    ((1, 70, 2, 8, 20), 64, 20.0),
    ((1, 70, 2, 8, 20), 64, 1e-4),
    ((1, 48, 2, 5, 20), 8, 0.3),  # six segments in Triton
    ((2, 45, 1, 8, 8), 5, 1e-2),  # nine
]


QUICK = [*CASES[:3], CASES[6], CASES[8]]


@cache  # shared by all implementations
def wanted(shape: tuple[int, ...], decay: float) -> Any:
    return with_gradients(oracle, draw(*shape, decay=decay), wide=True)


@pytest.mark.parametrize(("shape", "chunk", "decay"), support.slow_unless(lambda *case: case in QUICK, CASES), ids=str)
def test_equals_the_recurrence(implementation, shape, chunk, decay) -> None:
    got = with_gradients(partial(op, chunk=chunk, implementation=implementation), draw(*shape, decay=decay))
    assert_trees_close(got, wanted(shape, decay), "float32")


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bit_inputs_round_operands_only(implementation, dtype, per_head) -> None:
    arrays = draw(2, 45, 3, 8, 20, decay=0.1, dtype=dtype, per_head=per_head)
    f = partial(op, chunk=32, implementation=implementation)
    assert [t.dtype for t in jax.eval_shape(f, *arrays)] == [dtype, jnp.float32]
    # Reuse the op's cotangents: the oracle would round them to its own output dtypes.
    rng = np.random.default_rng(1)
    dy, d_last = (jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in jax.eval_shape(f, *arrays))
    got = pulled(f)(tuple(arrays), (dy, d_last))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (tuple(arrays), (dy, d_last)))
        want = jax.tree.map(np.asarray, pulled(oracle)(*wide))
    assert [t.dtype for t in got[1]] == [t.dtype for t in arrays]
    assert_trees_close(got, want, dtype)


@pytest.mark.parametrize("per_head", [False, True])
def test_without_dt_and_without_a_state(implementation, per_head) -> None:
    x, log_a, b, c, *_ = draw(2, 37, 3, 5, 6, per_head=per_head)

    def plain(f, x, log_a, b, c):
        return f(x, log_a, b, c)

    got = with_gradients(partial(plain, partial(ssd, chunk_size=16, implementation=implementation)), (x, log_a, b, c))
    state = jnp.zeros((2, 3, 6, 5))

    def wanted(x, log_a, b, c):
        return oracle(x, log_a, b, c, jnp.ones_like(log_a), state.astype(x.dtype))[0]

    want = with_gradients(wanted, (x, log_a, b, c), wide=True)
    assert_trees_close(got, want, "float32")


@pytest.mark.parametrize("shape", [(2, 37, 3, 5, 20), (1, 48, 2, 5, 20)], ids=str)
def test_b_and_c_per_head(implementation, shape) -> None:
    """With equal b and c per head, outputs match shared b and c."""
    arrays = draw(*shape, per_head=True)
    run = partial(op, chunk=8, implementation=implementation)
    assert_trees_close(with_gradients(run, arrays), with_gradients(oracle, arrays, wide=True), "float32")
    x, log_a, b, c, *rest = draw(*shape)
    copies, run = [jnp.repeat(t[:, :, None], x.shape[2], axis=2) for t in (b, c)], fast_jit(run)
    assert_trees_close(run(x, log_a, *copies, *rest), run(x, log_a, b, c, *rest), "float32")


# Decays that forget within a position, or never; one position; padded chunks, states and heads; several segments.
PER_HEAD = [
    ((1, 70, 2, 8, 20), 64, 20.0),
    ((1, 70, 2, 8, 20), 64, 1e-4),
    ((2, 1, 2, 5, 6), 16, 0.3),
    ((1, 45, 3, 20, 40), 24, 0.3),
    ((1, 48, 2, 5, 20), 8, 0.3),
]


@pytest.mark.parametrize(
    ("shape", "chunk", "decay"), support.slow_unless(lambda *case: case == PER_HEAD[0], PER_HEAD), ids=str
)
def test_b_and_c_per_head_for_weak_and_strong_decays(implementation, shape, chunk, decay) -> None:
    arrays = draw(*shape, decay=decay, per_head=True)
    got = with_gradients(partial(op, chunk=chunk, implementation=implementation), arrays)
    assert_trees_close(got, with_gradients(oracle, arrays, wide=True), "float32")


def test_gradients_per_head_stay_in_the_kernel() -> None:
    """In the backward pass, no float32 array is as large as B, and XLA multiplies no matrices."""
    arrays = draw(2, 64, 3, 8, 16, dtype="bfloat16", per_head=True)
    x, log_a, b, c, _, state = arrays
    g = jnp.cumsum(jnp.moveaxis(log_a.reshape(2, 4, 16, 3), 2, 3), axis=-1)
    states = jnp.zeros((2, 4, 3, 16, 8), x.dtype)
    run = partial(scan._run_backward, has_dt=True)
    program = jax.make_jaxpr(run)(x, g, jnp.ones_like(g), b, c, states, x, state)
    made = [(eqn.primitive.name, var.aval) for eqn in program.eqns for var in eqn.outvars]
    assert not [aval for _, aval in made if aval.dtype == jnp.float32 and aval.size >= b.size]
    assert "dot_general" not in {name for name, _ in made}
    dx, _, db, dc, *_ = program.out_avals
    assert [dx.dtype, db.dtype, dc.dtype] == [jnp.bfloat16] * 3


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_token_updates_the_state_without_a_kernel(dtype, per_head) -> None:
    arrays = draw(2, 1, 3, 5, 6, dtype=dtype, per_head=per_head)
    y, state = op(*arrays)
    assert [y.dtype, state.dtype] == [dtype, jnp.float32]
    want = with_gradients(oracle, arrays, wide=True)[0]
    assert_trees_close((y, state), want, dtype)


def test_is_causal_and_deterministic(implementation) -> None:
    arrays = draw(1, 50, 3, 6, 4)
    run = partial(op, implementation=implementation)
    first, again = with_gradients(run, arrays), with_gradients(run, arrays)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    changed = [x.at[:, 29:].multiply(2) if i < 5 else x for i, x in enumerate(arrays)]
    np.testing.assert_array_equal(with_gradients(run, changed)[0][0][:, :29], first[0][0][:, :29])


@pytest.mark.slow
def test_chunk_size_changes_nothing(implementation) -> None:
    arrays = draw(1, 50, 2, 6, 4)
    want = with_gradients(partial(op, chunk=16, implementation=implementation), arrays)
    for chunk in (5, 48, 300):  # triton caps 300
        got = with_gradients(partial(op, chunk=chunk, implementation=implementation), arrays)
        assert_trees_close(got, want, "float32")


@pytest.mark.slow
def test_under_vmap_and_checkpoint_equals_a_loop(implementation) -> None:
    each = [draw(1, 19, 2, 4, 4, seed=seed) for seed in range(2)]
    run = partial(op, implementation=implementation)
    stacked = [jnp.stack(x) for x in zip(*each, strict=True)]
    want = jax.tree.map(lambda *x: np.stack(x), *(with_gradients(run, x)[0] for x in each))
    assert_trees_close(fast_jit(jax.vmap(run))(*stacked), want, "float32")
    got = with_gradients(jax.checkpoint(run), each[0])
    assert_trees_close(got, with_gradients(run, each[0]), "float32")
    grad = jax.grad(lambda *a: run(*a)[0].sum(), argnums=1)
    assert_close(fast_jit(jax.vmap(grad))(*stacked)[1], fast_jit(grad)(*each[1]), "float32")


@pytest.mark.parametrize(
    ("programs", "chunks", "pieces"),
    [(48, 800, 8), (24, 800, 16), (24, 797, 1), (24, 40, 5), (24, 16, 1), (150, 800, 1), (300, 800, 1)],
)
def test_long_sequences_are_split_to_fill_the_gpu(monkeypatch, programs, chunks, pieces):
    monkeypatch.setattr(scan.interpreter, "is_chosen", lambda: False)
    assert scan.segments(programs, chunks) == pieces


def test_memory_of_the_backward_pass_is_linear() -> None:
    kept = []
    for T in (64, 128):
        arrays = draw(1, T, 2, 4, 4)
        pull = jax.eval_shape(lambda *a: jax.vjp(partial(op, chunk=16), *a)[1], *arrays)
        kept.append(sum(x.size for x in jax.tree.leaves(pull)))
    assert kept[1] < 2.1 * kept[0]


def problem(*, dtype="bfloat16", V=64, N=128, chunk=128, wide="float32", is_named=False) -> backend.Problem:
    sizes = [((1, 8, 2, V), dtype), ((1, 8, 2), wide), ((1, 8, N), dtype), ((1, 8, N), dtype), ((1, 2, N, V), wide)]
    operands = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in sizes)
    return backend.Problem("gpu", operands, {"chunk_size": chunk}, is_named)


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(dtype="float32", V=5, N=3)) is None
    assert re.search("dim 160 .*state 128 .* 128", str(refusal(problem(V=160))))
    assert re.search("dim 64 .*state 256 .* 128", str(refusal(problem(N=256))))
    assert "1 positions per" in str(refusal(problem(chunk=1)))
    assert refusal(problem(chunk=1, is_named=True)) is None
    with jax.enable_x64(True):
        assert "operands are float64" in str(refusal(problem(dtype="float64", wide="float64")))


def test_meshes_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert refusal(problem()) is None


def test_double_precision_uses_xla() -> None:
    with jax.enable_x64(True):
        x, log_a, b, c, dt, state = (t.astype(jnp.float64) for t in draw(1, 20, 1, 4, 4))
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton)"):
            kp.ssd(x, log_a, b, c, state, dt, chunk_size=16, implementation="triton")
        jax.eval_shape(partial(kp.ssd, chunk_size=16), x, log_a, b, c, state, dt)
    assert kp.backends_used()["ssd"] == "xla"
