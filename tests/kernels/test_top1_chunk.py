"""Top-1 Chunk in difficult cases.

These are lengths near the chunk size, adversarial selections, ties, causality and extreme scores.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.select_chunk import reference as select_reference
from kernels_pallas.top1_chunk import reference
from kernels_pallas.top1_chunk import triton as chunk_triton
from tests import extras, support
from tests.kernels.common import (
    HOW,
    SCHEDULES,
    Shape,
    assert_close,
    assert_selection,
    chunk_attention,
    cotangent,
    fast_jit,
    qkv,
    selector,
    value_and_grads,
)

# Run each schedule and the kernels once.
each_way = pytest.mark.parametrize(
    ("selection", "how"),
    support.slow_unless(
        lambda *case: case in [("best_key", "masked"), ("approx", "sorted"), ("exact", "triton")],
        [(selection, how) for how in HOW for selection in ("exact", "best_key", "approx")],
    ),
)


@pytest.mark.parametrize(("selection", "schedule"), [("exact", "masked"), ("exact", "sorted"), ("approx", "sorted")])
def test_equals_reference_in_double(small_tiles, selection, schedule) -> None:
    shape = Shape(T=53)
    with jax.enable_x64(True):
        q, k, v = qkv(shape, dtype="float64")
        options = {"chunk_size": shape.C, "selection": selection}
        f = partial(chunk_attention, how=schedule, **options)
        got = value_and_grads(f, q, k, v)
        want = value_and_grads(lambda *a: reference.top1_chunk_attention(*a, **options), q, k, v)
        jax.tree.map(lambda a, b: assert_close(a, b, "float64"), got, want)


@cache  # shared by all implementations
def wanted_at(length: int):
    return value_and_grads(lambda *a: reference.top1_chunk_attention(*a, chunk_size=16), *qkv(Shape(T=length, B=1)))


@pytest.mark.parametrize("length", support.slow_unless(lambda length: length in (1, 33), [1, 16, 17, 33]))
def test_lengths_around_the_chunk(small_tiles, how, length) -> None:
    q, k, v = qkv(Shape(T=length, B=1))
    got = value_and_grads(lambda *a: chunk_attention(*a, chunk_size=16, how=how), q, k, v)
    want = wanted_at(length)
    jax.tree.map(lambda a, b: assert_close(a, b, "float32"), got, want)


def chosen_by_all(own):
    return np.zeros_like(own)


def odd_ones_by_none(own):
    return (own - 1) // 2 * 2


def chosen_latest(own):
    return own - 1


def chosen_at_random(own):
    return np.random.default_rng(0).integers(0, np.maximum(own, 1))


ADVERSARIAL = [chosen_by_all, odd_ones_by_none, chosen_latest, chosen_at_random]


@pytest.mark.parametrize("choose", support.slow_unless(lambda choose: choose in ADVERSARIAL[:2], ADVERSARIAL))
def test_adversarial_selections(small_tiles, how, choose) -> None:
    shape = Shape(T=75, C=8, R=3, B=1, G=1)
    q, k, v = qkv(shape)
    own = np.broadcast_to(np.arange(shape.T)[None, :, None] // shape.C, (shape.B, shape.T, shape.heads))
    sel = jnp.asarray(np.where(own == 0, -1, choose(own)), jnp.int32)
    attend = chunk_triton.load() if how == "triton" else SCHEDULES[how]
    static = {"chunk_size": shape.C, "scale": 0.7}

    @fast_jit
    def ours(q, k, v, do):
        o, lse = attend.forward(q, k, v, sel, **static)
        return o, attend.backward(q, k, v, o, lse, sel, do, **static)

    got = ours(q, k, v, cotangent(q[..., : shape.V]))
    want = value_and_grads(lambda *a: reference.attend(*a, sel, **static), q, k, v)
    jax.tree.map(lambda a, b: assert_close(a, b, "float32"), got, want)


@pytest.mark.parametrize(
    ("selection", "how"),
    support.slow_unless(
        lambda *case: case == ("exact", "triton"),
        [("exact", "masked"), ("approx", "sorted"), ("exact", "triton"), ("approx", "triton")],
    ),
)
def test_one_chunk_attracts_every_query(small_tiles, selection, how) -> None:
    shape = Shape(T=60, C=8, B=1, G=1)
    q, k, v = qkv(shape)
    q = jnp.abs(q)
    k = k.at[:, :8].set(3.0)
    options = {"chunk_size": 8, "selection": selection}
    sel = fast_jit(partial(kp.select_chunk, implementation=selector(how), **options))(q, k)
    assert (np.asarray(sel)[:, 8:] == 0).all()
    got = value_and_grads(lambda *a: chunk_attention(*a, how=how, **options), q, k, v)
    want = value_and_grads(lambda *a: reference.top1_chunk_attention(*a, **options), q, k, v)
    jax.tree.map(lambda a, b: assert_close(a, b, "float32"), got, want)


def test_ties_go_to_the_smallest_chunk(small_tiles, selection, implementation) -> None:
    shape = Shape(T=64, C=8, B=1)
    q, k, _ = qkv(shape)
    options = {"chunk_size": 8, "selection": selection}
    select = jax.jit(partial(kp.select_chunk, scale=1.0, implementation=implementation, **options))
    sel = select(jnp.zeros_like(q), k)
    assert (np.asarray(sel)[:, 8:] == 0).all()
    # Chunks 0 and 1 differ, later chunks repeat them. Small integers make equal scores bitwise equal.
    rng = np.random.default_rng(0)
    pair = rng.integers(-2, 3, size=(16, shape.G, shape.K))
    k = jnp.asarray(np.tile(pair, (4, 1, 1))[None], jnp.float32)
    q = jnp.asarray(rng.integers(-2, 3, size=q.shape), jnp.float32)
    sel = np.asarray(select(q, k))
    assert (sel[:, 16:] <= 1).all()
    np.testing.assert_array_equal(sel, select_reference.select_chunk(q, k, scale=1.0, **options))


def test_approx_distinguishes_means_beyond_bfloat16(implementation) -> None:
    """The chunk means are 1 and 1 + 2^-10.

    Keys are 1, except for 1 + 2^-7 once in the second chunk.
    """
    k = np.zeros((1, 24, 1, 8))
    k[..., 0] = 1
    k[:, 8, :, 0] += 2**-7
    k, q = jnp.asarray(k, jnp.bfloat16), jnp.ones((1, 24, 1, 8), jnp.bfloat16)
    sel = kp.select_chunk(q, k, chunk_size=8, selection="approx", implementation=implementation)
    assert (np.asarray(sel)[:, 16:] == 1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_split_means_sum_to_float32(dtype) -> None:
    extras.need("triton")
    from kernels_pallas.select_chunk.triton.select import _table_parts

    k = jnp.asarray(np.random.default_rng(0).normal(size=(1, 19, 2, 8)), dtype)
    parts = _table_parts(k, 8, "mean")
    want = np.asarray(k, np.float64)[:, :16].reshape(1, 2, 8, 2, 8).mean(2)
    assert parts.dtype == dtype
    np.testing.assert_allclose(np.asarray(parts, np.float64).sum(1)[:, 0], want, rtol=0, atol=3e-7)


@each_way
def test_first_chunk_is_local_only(selection, how) -> None:
    q, k, v = qkv(Shape(T=40, C=16, B=1))
    run = partial(chunk_attention, selection=selection, how=how)
    o = jax.jit(partial(run, chunk_size=16))(q, k, v)
    alone = jax.jit(partial(run, chunk_size=64))(q[:, :16], k[:, :16], v[:, :16])
    np.testing.assert_allclose(o[:, :16], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("selection", "how", "dtype"),
    [
        pytest.param("exact", "masked", "float32", marks=pytest.mark.slow),
        ("exact", "sorted", "bfloat16"),
        ("approx", "sorted", "float32"),
        ("exact", "triton", "bfloat16"),
        ("approx", "triton", "float32"),
    ],
)
def test_causal_to_the_last_bit(small_tiles, selection, how, dtype) -> None:
    """Changing token t leaves earlier outputs bitwise equal."""
    shape = Shape(T=61, C=8, B=1, G=1 if how == "triton" else 2)
    q, k, v = qkv(shape, dtype=dtype, gain=2)
    run = jax.jit(partial(chunk_attention, chunk_size=8, selection=selection, how=how))
    before = np.asarray(run(q, k, v).astype(jnp.float32))
    for t in (8, 23, 60) if how == "triton" else (1, 8, 23, 40, 60):
        changed = (x.at[:, t].multiply(-3) for x in (q, k, v))
        after = np.asarray(run(*changed).astype(jnp.float32))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any()


def test_extreme_scores_stay_finite(small_tiles, how) -> None:
    q, k, v = qkv(Shape(T=50, C=8, B=1, G=1), gain=1e3)
    f = partial(chunk_attention, chunk_size=8, how=how)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(value_and_grads(f, q, k, v)))


@pytest.mark.parametrize("gain", [1.0, 30.0, 1e3], ids=["bounded", "by-first-chunk", "by-maximum"])
@pytest.mark.parametrize("length", [75, pytest.param(128, marks=pytest.mark.slow)])
def test_all_mass_comparisons(gain, length, implementation) -> None:
    """The exact kernel compares masses in three ways, by score size.

    See select_chunk/triton/kernels.py.
    """
    shape = Shape(T=length, B=1, G=1, C=16, K=16)
    q, k, _ = qkv(shape, gain=gain)
    k = k.at[:, 32:48].multiply(gain if gain > 100 else 1.0)  # far larger than in chunk 0: its mass overflows
    options = {"chunk_size": 16, "selection": "exact", "scale": None}
    sel = np.asarray(kp.select_chunk(q, k, implementation=implementation, **options))
    assert_selection(sel, np.asarray(select_reference.chunk_scores(q, k, **options)), 16)


@each_way
def test_two_runs_give_the_same_bits(how, selection) -> None:
    q, k, v = qkv(Shape(T=50, B=1, R=1))
    f = partial(chunk_attention, chunk_size=16, selection=selection, how=how)
    one, two = (value_and_grads(f, q, k, v) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, two)
