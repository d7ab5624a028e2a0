"""Top-1 Chunk against its dense definition, for many shapes, dtypes and scales."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.select_chunk import reference as select_reference
from kernels_pallas.top1_chunk import reference
from tests import support
from tests.kernels.common import (
    ON_GPU,
    Shape,
    assert_close,
    assert_selection,
    chunk_attention,
    cotangent,
    fast_jit,
    qkv,
    selector,
    settings,
    unshrunk,
)

shapes = st.builds(
    Shape,
    B=st.integers(1, 2),
    T=st.integers(1, 70),
    R=st.integers(1, 3),
    G=st.integers(1, 2),
    K=st.sampled_from([1, 4, 8]),
    V=st.sampled_from([1, 5, 8]),
    C=st.sampled_from([1, 3, 8, 16]),
)


case = hypothesis.given(
    shape=shapes,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    gain=st.sampled_from([0.1, 1.0, 6.0]),
    selection=st.sampled_from(["exact", "best_key", "approx"]),
    scale=st.sampled_from([None, 0.5, -0.5]),
    seed=st.integers(0, 3),
)


def check(how, shape, dtype, gain, selection, scale, seed) -> None:
    q, k, v = qkv(shape, seed=seed, dtype=dtype, gain=gain)
    options = {"chunk_size": shape.C, "selection": selection, "scale": scale}

    def ours(q, k, v, do):
        o, pull = jax.vjp(lambda *a: chunk_attention(*a, how=how, **options), q, k, v)
        return o, pull(do), kp.select_chunk(q, k, implementation=selector(how), **options)

    def theirs(q, k, v, do, sel):  # in fp32 with our selection, which is checked separately
        attend = partial(reference.attend, chunk_size=shape.C, scale=scale)
        o, pull = jax.vjp(lambda *a: attend(*a, sel), q, k, v)
        return o, pull(do), select_reference.chunk_scores(q, k, **options)

    do = cotangent(jax.ShapeDtypeStruct((shape.B, shape.T, shape.heads, shape.V), dtype))
    o, grads, sel = fast_jit(ours)(q, k, v, do)
    wide = (np.asarray(x, np.float32) for x in (q, k, v, do))
    o_want, grads_want, score = fast_jit(theirs)(*wide, sel)
    assert_selection(np.asarray(sel), np.asarray(score), shape.C)
    assert o.dtype == v.dtype
    assert_close(o, o_want, dtype, "o")
    for name, got, want, x in zip("qkv", grads, grads_want, (q, k, v), strict=True):
        assert got.dtype == x.dtype
        assert_close(got, want, dtype, f"d{name}", scale=max(1.0, gain))


@pytest.mark.parametrize("how", ["masked", "sorted"])
@case
@hypothesis.settings(settings, max_examples=4)
def test_equals_reference(small_tiles, how, shape, dtype, gain, selection, scale, seed) -> None:
    check(how, shape, dtype, gain, selection, scale, seed)


# Chunks are shorter than a tile, which masks its other keys; the negative scale reverses the score order.
turned = hypothesis.example(
    shape=Shape(B=1, T=18, R=1, G=1, K=4, V=8, C=3),
    dtype="bfloat16",
    gain=1.0,
    selection="exact",
    scale=-0.5,
    seed=0,
)


@pytest.mark.parametrize("how", support.slow_unless(lambda _: ON_GPU, ["triton"]))
@turned
@case
@hypothesis.settings(unshrunk, max_examples=6 if ON_GPU else 2)
def test_kernels_equal_reference(how, shape, dtype, gain, selection, scale, seed) -> None:
    check(how, shape, dtype, gain, selection, scale, seed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["masked", "sorted"])
@case
@hypothesis.settings(settings, max_examples=80)
def test_equals_reference_widely(small_tiles, how, shape, dtype, gain, selection, scale, seed) -> None:
    check(how, shape, dtype, gain, selection, scale, seed)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["triton"])
@case
@hypothesis.settings(unshrunk, max_examples=80 if ON_GPU else 12)
def test_kernels_equal_reference_widely(how, shape, dtype, gain, selection, scale, seed) -> None:
    check(how, shape, dtype, gain, selection, scale, seed)
