"""The delta rule: both backends against the recurrence in double precision.

Gradients are compared as well.
"""

import math
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import backend
from kernels_pallas.delta_rule import reference
from kernels_pallas.delta_rule.triton import refusal
from kernels_pallas.triton import runtime
from kernels_pallas.triton.blocks import block_of
from tests import extras, support
from tests.kernels.common import assert_close, assert_each_close, count_primitive, fast_jit, outputs_and_gradients

scan = extras.triton_module("delta_rule.triton.scan")

NAMES = ("q", "k", "v", "beta", "log_g", "state")


def draw(T, K, V, *, decay: float | None, B=1, H=2, dtype="float32", seed=0) -> list[Any]:
    """Draw q, k, v, beta, log_g and state.

    Queries and keys are unit vectors, beta covers [0, 2] including both ends, decays are around -`decay`.
    """
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(B, T, H, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, state = rng.normal(size=(B, T, H, V)), rng.normal(size=(B, H, K, V))
    beta = np.clip(rng.normal(1, 1, size=(B, T, H)), 0, 2)
    log_g = None if decay is None else jnp.asarray(-decay * np.exp(0.5 * rng.normal(size=(B, T, H))), jnp.float32)
    wide = jnp.asarray(beta, jnp.float32), log_g, jnp.asarray(state, jnp.float32)
    return [*(jnp.asarray(x, dtype) for x in (q, k, v)), *wide]


def op(*arrays, chunk=64, implementation=None):
    return kp.delta_rule(*arrays, chunk_size=chunk, implementation=implementation)


with_gradients = partial(outputs_and_gradients, like=partial(op, implementation="xla"), names=NAMES)
assert_trees_close = partial(assert_each_close, of_ones="log_g")


# Several chunks with a partial last chunk; values with several blocks, a partial block, and another width than keys;
# lengths of exactly one chunk, one more and one less; decays that forget within a position, never forget, or are
# absent.
CASES = [
    ((70, 8, 20), 64, 0.3),
    ((1, 5, 6), 64, 0.3),
    ((65, 8, 16), 64, 30.0),
    ((5, 6, 3), 64, None),
    ((63, 8, 16), 64, 0.3),
    ((64, 8, 16), 64, None),
    ((130, 20, 8), 64, 1e-4),
    ((130, 20, 40), 64, None),
    ((70, 8, 20), 64, 30.0),
    ((130, 16, 16), 32, 0.3),
    ((45, 8, 8), 5, 0.3),
]
QUICK = CASES[:3]


@cache  # shared by all implementations
def wanted(shape: tuple[int, ...], decay: float | None) -> Any:
    return with_gradients(reference.delta_rule, draw(*shape, decay=decay), wide=True)


@pytest.mark.parametrize(("shape", "chunk", "decay"), support.slow_unless(lambda *case: case in QUICK, CASES), ids=str)
def test_equals_the_recurrence(implementation, shape, chunk, decay) -> None:
    got = with_gradients(partial(op, chunk=chunk, implementation=implementation), draw(*shape, decay=decay))
    assert_trees_close(got, wanted(shape, decay))


def test_outputs_in_the_pass_over_time_equal_the_recurrence(monkeypatch) -> None:
    extras.need("torch", "triton")
    monkeypatch.setattr(scan, "FUSED", 0)
    arrays = draw(20, 8, 20, decay=0.3, H=1)
    got = with_gradients(partial(op, chunk=16, implementation="triton"), arrays)
    assert_trees_close(got, with_gradients(reference.delta_rule, arrays, wide=True))


@pytest.fixture(params=[0, 10**9], ids=["fused", "unfused"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the outputs in Triton's pass over time, or in a launch after it.

    Test arrays are so small that without this fixture the launch after it does.
    """
    monkeypatch.setattr(scan, "FUSED", request.param)
    jax.clear_caches()


FORMS = [
    ((70, 8, 20), 64, 0.3, "float32"),
    ((130, 20, 40), 64, None, "float32"),
    ((65, 8, 16), 64, 30.0, "float32"),
    ((130, 16, 24), 64, 0.1, "bfloat16"),
    ((130, 16, 24), 32, None, "float16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "chunk", "decay", "dtype"), FORMS, ids=str)
@pytest.mark.parametrize("implementation", ["triton"])
def test_both_forms_equal_the_recurrence(fused, implementation, shape, chunk, decay, dtype) -> None:
    """Without a gradient, a fused pass writes neither states nor W."""
    arrays, run = draw(*shape, decay=decay, dtype=dtype), partial(op, chunk=chunk, implementation=implementation)
    got, want = with_gradients(run, arrays), with_gradients(reference.delta_rule, arrays, wide=True)
    if dtype == "float32":
        assert_trees_close(got, want)
    else:
        assert_16_bits_close(got, want, dtype)
    jax.tree.map(np.testing.assert_array_equal, fast_jit(run)(*arrays), tuple(got[0]))


@pytest.mark.slow
def test_mixed_decay_scales_in_a_chunk(implementation) -> None:
    """Sums of log g reach -1,000, where float32 rounding is 6e-5.

    This is three times the tolerance 2e-5.
    """
    arrays = draw(130, 8, 20, decay=1.0)
    sizes = jnp.asarray(np.random.default_rng(2).choice([1e-4, 0.05, 1.0, 30.0], size=arrays[4].shape), jnp.float32)
    arrays[4] = -sizes
    got = with_gradients(partial(op, implementation=implementation), arrays)
    assert_trees_close(got, with_gradients(reference.delta_rule, arrays, wide=True), slack=3)


@pytest.mark.parametrize("decay", [0.3, None])
@pytest.mark.parametrize("implementation", ["triton"])
def test_gradients_match_xla(implementation, decay) -> None:
    arrays = draw(100, 8, 20, decay=decay, B=2)

    def grad(name: str) -> Any:
        return with_gradients(partial(op, implementation=name), arrays)

    assert_trees_close(grad(implementation), grad("xla"))


@pytest.mark.parametrize(("implementation", "beta"), [("xla", 1.0), ("triton", 1.0), ("triton", 2.0)])
def test_equal_keys_and_full_corrections_stay_accurate(implementation, beta) -> None:
    """Repeat one token, so that corrections are as large as possible.

    Below the diagonal, A is all ones or all twos, and the inverse of I + A alternates in sign. With twos, xla's Neumann
    products grow to 1e4 before they cancel, and float32 loses accuracy: the products that make the inverse X of a chunk
    (64 tokens) lose 2^-24 |X| |I + A| |X|, up to 1e-3 for entries of 2. The observed error is 6e-5 where k . k is not
    exactly 1, else 0. A single TF32 product would lose 0.1.
    """
    arrays = draw(70, 8, 8, decay=None)
    arrays[1], arrays[3] = jnp.broadcast_to(arrays[1][:, :1], arrays[1].shape), jnp.full_like(arrays[3], beta)
    got = with_gradients(partial(op, implementation=implementation), arrays)
    slack = 25 if beta == 2 else 1  # 5e-4
    assert_trees_close(got, with_gradients(reference.delta_rule, arrays, wide=True), slack=slack)


# Number of 16-bit roundings on a gradient's longest path: state and W in the forward pass (S, Y, X, X * G, W), then dY
# (dS, P, dO, X, X * G, dW, dY), Z or M, a part of dk, and the result. Independent errors of at most u each sum to
# sqrt(16) u relative to the terms.
ROUNDINGS, UNIT = 16, {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def assert_16_bits_close(got: Any, want: Any, dtype: str) -> None:
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        worst = np.abs(g.astype(np.float64) - w).max() / np.abs(w).max()
        assert worst <= math.sqrt(ROUNDINGS) * UNIT[dtype], (jax.tree_util.keystr(path), worst)


@pytest.mark.parametrize(
    ("dtype", "decay"),
    support.slow_unless(
        lambda *case: case == ("bfloat16", 0.1), [(dtype, decay) for dtype in UNIT for decay in (0.1, None)]
    ),
)
def test_16_bit_inputs_round_operands_only(implementation, dtype, decay) -> None:
    arrays = draw(130, 16, 24, decay=decay, dtype=dtype)
    got = with_gradients(partial(op, implementation=implementation), arrays)
    assert [x.dtype for x in got[0]] == [dtype, np.float32]
    for name, x in zip(NAMES, arrays, strict=True):
        assert x is None or got[1][name].dtype == x.dtype
    assert_16_bits_close(got, with_gradients(reference.delta_rule, arrays, wide=True), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("K", "V"), [(64, 64), (96, 96), (96, 192), (128, 128)])
@pytest.mark.parametrize("implementation", ["triton"])
def test_with_real_head_sizes_and_gpu_tiles(monkeypatch, fused, implementation, K, V) -> None:
    monkeypatch.setattr(scan, "tile", lambda kernel, dtype: scan.TILES[kernel, jnp.finfo(dtype).bits])
    arrays = draw(70, K, V, decay=0.1, dtype="bfloat16", H=1)
    got = with_gradients(partial(op, implementation=implementation), arrays)
    assert_16_bits_close(got, with_gradients(reference.delta_rule, arrays, wide=True), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "V"), [(64, 64), (96, 96), (96, 192), (128, 128)])
@pytest.mark.parametrize("decay", [0.1, None])
@pytest.mark.parametrize("implementation", ["triton"])
def test_loading_ahead_changes_no_bit(monkeypatch, fused, implementation, K, V, decay) -> None:
    """Loads ahead once changed beta, k and log g gradients by 5%.

    This was rows_kernel with Triton 3.6 on an H200 and one head.
    """
    arrays = draw(70, K, V, decay=decay, dtype="bfloat16", H=1)
    run = partial(op, implementation=implementation)
    got = with_gradients(run, arrays)
    monkeypatch.setattr(scan, "TILES", {key: tile._replace(stages=1) for key, tile in scan.TILES.items()})
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, got, with_gradients(run, arrays))


# Five chunks of 16 give three segments, the last with one chunk; four chunks give two. Values and keys have several
# blocks, including a partial block. Some decays forget within a position; some are absent.
SEGMENTS = [
    ((70, 8, 20), 0.3, "float32"),
    ((70, 24, 20), None, "float32"),
    ((64, 8, 8), 30.0, "float32"),
    ((70, 16, 24), 0.1, "bfloat16"),
    ((70, 16, 24), None, "bfloat16"),
    ((70, 16, 24), 0.1, "float16"),
]


@pytest.mark.parametrize(
    ("shape", "decay", "dtype"), support.slow_unless(lambda *case: case == SEGMENTS[0], SEGMENTS), ids=str
)
@pytest.mark.parametrize("implementation", ["triton"])
def test_segments_of_time_equal_the_recurrence(short_segments, fused, implementation, shape, decay, dtype) -> None:
    arrays = draw(*shape, decay=decay, B=2, dtype=dtype)
    got = with_gradients(partial(op, chunk=16, implementation=implementation), arrays)
    want = with_gradients(reference.delta_rule, arrays, wide=True)
    if dtype == "float32":
        assert_trees_close(got, want)
    else:
        assert_16_bits_close(got, want, dtype)


def test_starts_from_zero_without_a_state(implementation) -> None:
    *arrays, state = draw(20, 8, 6, decay=0.3)
    got = fast_jit(partial(op, implementation=implementation))(*arrays)
    assert_trees_close(got, fast_jit(reference.delta_rule)(*arrays, jnp.zeros_like(state)))


@pytest.mark.slow
def test_is_causal_and_deterministic(implementation) -> None:
    arrays = draw(70, 6, 4, decay=0.3)
    run = partial(op, implementation=implementation)
    first, again = with_gradients(run, arrays), with_gradients(run, arrays)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    changed = [x.at[:, 29:].multiply(0.5) if i < 5 else x for i, x in enumerate(arrays)]
    np.testing.assert_array_equal(with_gradients(run, changed)[0][0][:, :29], first[0][0][:, :29])


@pytest.mark.slow
def test_chunk_size_changes_nothing(implementation) -> None:
    arrays = draw(50, 6, 4, decay=0.3)
    want = with_gradients(partial(op, chunk=16, implementation=implementation), arrays)
    for chunk in (5, 48, 300):  # triton rounds these to 16, 64, 64
        assert_trees_close(with_gradients(partial(op, chunk=chunk, implementation=implementation), arrays), want)


@pytest.mark.slow
def test_under_vmap_and_checkpoint_equals_a_loop(implementation) -> None:
    each = [draw(19, 4, 6, decay=0.3, seed=seed) for seed in range(2)]
    run = partial(op, implementation=implementation)
    stacked = [jnp.stack(x) for x in zip(*each, strict=True)]
    want = jax.tree.map(lambda *x: np.stack(x), *(with_gradients(run, x)[0] for x in each))
    assert_trees_close(fast_jit(jax.vmap(run))(*stacked), want)
    assert_trees_close(with_gradients(jax.checkpoint(run), each[0]), with_gradients(run, each[0]))
    grad = jax.grad(lambda *a: run(*a)[0].sum(), argnums=4)
    assert_close(fast_jit(jax.vmap(grad))(*stacked)[1], fast_jit(grad)(*each[1]), "float32")


@pytest.mark.parametrize("implementation", ["triton"])
def test_a_policy_that_keeps_states_and_inverses_repeats_no_kernel(implementation) -> None:
    arrays = draw(20, 4, 4, decay=0.3)

    def passes(policy: Any) -> int:
        """Run forward, backward, and forward again."""
        run = jax.checkpoint(lambda *x: op(*x, implementation=implementation)[0].sum(), policy=policy)
        return count_primitive(jax.make_jaxpr(jax.grad(run))(*arrays).jaxpr, "custom_vmap_call")

    saved = jax.checkpoint_policies.save_only_these_names("chunk_inverse", "chunk_states")
    assert (passes(saved), passes(None)) == (2, 3)


def problem(*, dtype="bfloat16", K=96, V=192, wide="float32") -> backend.Problem:
    k, v, row, state = ((1, 8, 2, K), dtype), ((1, 8, 2, V), dtype), ((1, 8, 2), wide), ((1, 2, K, V), wide)
    operands = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in (k, k, v, row, state, row))
    return backend.Problem("gpu", operands, {"chunk_size": 64})


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(dtype="float32", K=5, V=3)) is None
    assert re.search("key dim 160 .* 128", str(refusal(problem(K=160))))
    assert re.search("value dim 320 .* 256", str(refusal(problem(V=320))))
    assert "operands are bfloat16" in str(refusal(problem(wide="bfloat16")))
    with jax.enable_x64(True):
        assert "operands are float64" in str(refusal(problem(dtype="float64", wide="float64")))


def test_double_precision_uses_xla() -> None:
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in draw(20, 4, 4, decay=0.3)]
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton)"):
            op(*arrays, implementation="triton")
        assert [x.dtype for x in jax.eval_shape(op, *arrays)] == [jnp.float64] * 2
    assert kp.backends_used()["delta_rule"] == "xla"


def test_empty_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        op(*draw(4, 4, 4, decay=None), chunk=0)


@pytest.mark.parametrize(("V", "block"), [(64, 64), (96, 32), (128, 64), (192, 64), (256, 64), (100, 64), (20, 32)])
def test_value_blocks_are_mostly_full(V, block) -> None:
    assert block_of(64, V) == block
