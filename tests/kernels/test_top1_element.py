"""Top-1 Element against its dense definition.

The forward value is exact, the backward pass uses the straight-through gradient.
"""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.top1_element import reference
from seqjax.ops import top1_straight_through
from tests.kernels.common import (
    ON_GPU,
    Shape,
    assert_close,
    cotangent,
    count_primitive,
    fast_jit,
    qkv,
    settings,
    unshrunk,
    value_and_grads,
)

shapes = st.builds(
    Shape,
    B=st.integers(1, 2),
    T=st.integers(1, 150),
    R=st.integers(1, 3),
    G=st.integers(1, 2),
    K=st.sampled_from([1, 4, 8]),
    V=st.sampled_from([1, 5, 8]),
)


case = hypothesis.given(
    shape=shapes,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    gain=st.sampled_from([0.1, 1.0, 6.0]),
    v_grad=st.sampled_from(["hard", "soft"]),
    scale=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 3),
)


def check(shape, dtype, gain, v_grad, scale, seed, implementation="xla") -> None:
    q, k, v = qkv(shape, seed=seed, dtype=dtype, gain=gain)
    options = {"scale": scale, "v_grad": v_grad}
    attention = partial(kp.top1_element_attention, implementation=implementation)

    def ours(q, k, v, do):
        o, pull = jax.vjp(lambda *a: attention(*a, **options), q, k, v)
        return o, pull(do), attention(q, k, v, **options)

    do = cotangent(jax.ShapeDtypeStruct((shape.B, shape.T, shape.heads, shape.V), dtype))
    o, grads, o_eval = fast_jit(ours)(q, k, v, do)
    assert o.tobytes() == o_eval.tobytes()  # bitwise equal with and without differentiation
    wide = tuple(np.asarray(x, np.float32) for x in (q, k, v))
    o_want, grads_want = value_and_grads(lambda *a: reference.top1_element_attention(*a, **options), *wide)
    assert o.dtype == v.dtype
    # Another summation order may change an argmax only where two scores agree up to rounding.
    flipped = np.abs(np.asarray(o, np.float32) - np.asarray(o_want)).max(-1) > 1e-2
    if flipped.any():
        s = np.einsum("bthk,bshk->bths", wide[0], np.repeat(wide[1], shape.R, axis=2))
        s = np.sort(np.where(np.tri(shape.T, dtype=bool)[None, :, None], s, -np.inf), -1)
        assert (s[..., -1] - s[..., -2])[flipped].max() < 1e-4
        return
    for name, got, want, x in zip("qkv", grads, grads_want, (q, k, v), strict=True):
        assert got.dtype == x.dtype
        assert_close(got, want, dtype, f"d{name}", scale=max(1.0, gain))


@case
@hypothesis.settings(settings, max_examples=3)
def test_equals_reference(small_tiles, shape, dtype, gain, v_grad, scale, seed) -> None:
    check(shape, dtype, gain, v_grad, scale, seed)


@pytest.mark.slow
@case
@hypothesis.settings(settings, max_examples=60)
def test_equals_reference_widely(small_tiles, shape, dtype, gain, v_grad, scale, seed) -> None:
    check(shape, dtype, gain, v_grad, scale, seed)


@pytest.mark.parametrize("name", ["triton"])
@case
@hypothesis.settings(unshrunk, max_examples=2)
def test_kernels_equal_reference(name, shape, dtype, gain, v_grad, scale, seed) -> None:
    check(shape if ON_GPU else shape._replace(T=1 + shape.T // 2), dtype, gain, v_grad, scale, seed, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton"])
@case
@hypothesis.settings(unshrunk, max_examples=40 if ON_GPU else 8)
def test_kernels_equal_reference_widely(name, shape, dtype, gain, v_grad, scale, seed) -> None:
    check(shape, dtype, gain, v_grad, scale, seed, name)


@pytest.mark.parametrize("name", ["triton"])
@pytest.mark.parametrize("length", [1, 16, 31, 32, 33, 65])
def test_kernels_at_lengths_around_a_tile(name, length) -> None:
    check(Shape(B=1, T=length, R=2, G=1), "float32", 1.0, "hard", None, length, name)


@pytest.mark.gpu
@pytest.mark.parametrize("v_grad", ["hard", "soft"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("T", "dim"), [(1024, 64), (127, 64), (129, 96), (1000, 96), (513, 128), (640, 128)])
def test_kernels_at_their_real_sizes(T, dim, dtype, v_grad) -> None:
    check(Shape(B=2, T=T, R=2, G=2, K=dim, V=dim), dtype, 1.0, v_grad, None, 0, "triton")


@pytest.mark.parametrize("v_grad", ["hard", "soft"])
def test_equals_reference_in_double(small_tiles, v_grad) -> None:
    with jax.enable_x64(True):
        q, k, v = qkv(Shape(T=131), dtype="float64")
        got = value_and_grads(lambda *a: kp.top1_element_attention(*a, v_grad=v_grad), q, k, v)
        want = value_and_grads(lambda *a: reference.top1_element_attention(*a, v_grad=v_grad), q, k, v)
        jax.tree.map(lambda a, b: assert_close(a, b, "float64"), got, want)


def test_equals_the_dense_straight_through_op() -> None:
    """`seqjax.ops` with the whole score matrix gives the same estimator."""
    q, k, v = qkv(Shape(T=40, R=1))

    def dense(q, k, v):
        s = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
        a = top1_straight_through(jnp.where(np.tri(40, dtype=bool), s, -1e30))
        return jnp.einsum("bhts,bshv->bthv", a, v)

    got, want = (value_and_grads(f, q, k, v) for f in (kp.top1_element_attention, dense))
    jax.tree.map(lambda a, b: assert_close(a, b, "float32"), got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_output_is_a_row_of_v(small_tiles, dtype, implementation) -> None:
    q, k, v = qkv(Shape(T=130 if implementation == "xla" else 70, B=1, R=2, G=1), dtype=dtype)
    attention = jax.jit(partial(kp.top1_element_attention, implementation=implementation))
    o = np.asarray(attention(q, k, v).astype(jnp.float32))[0]
    rows = {row.tobytes() for row in np.asarray(v.astype(jnp.float32))[0, :, 0]}
    assert all(row.tobytes() in rows for row in o.reshape(-1, o.shape[-1]))
    np.testing.assert_array_equal(o[0], np.asarray(v.astype(jnp.float32))[0, [0, 0], 0])


def test_ties_go_to_the_earliest_key(small_tiles, implementation) -> None:
    repeats = 14 if implementation == "xla" else 7
    q, k, v = qkv(Shape(T=10 * repeats, R=1, G=1))
    attention = jax.jit(partial(kp.top1_element_attention, implementation=implementation))
    o = attention(jnp.zeros_like(q), k, v)
    np.testing.assert_array_equal(o, jnp.broadcast_to(v[:, :1], v.shape))
    k = jnp.tile(jnp.sign(k[:, :10]), (1, repeats, 1, 1))  # ten repeated keys: products of signs are exact
    o, _ = value_and_grads(attention, jnp.sign(q), k, v)
    seen = np.asarray(v)[:, :10]
    assert (np.asarray(o)[:, :, None] == seen[:, None]).all(-1).any(2).all()


def test_causal_to_the_last_bit(small_tiles, implementation) -> None:
    q, k, v = qkv(Shape(T=130, B=1) if implementation == "xla" else Shape(T=70, B=1, R=1))
    run = jax.jit(partial(kp.top1_element_attention, implementation=implementation))
    before = np.asarray(run(q, k, v))
    for t in (1, 64, 100, 129) if implementation == "xla" else (33, 64):
        after = np.asarray(run(*(x.at[:, t].multiply(-3) for x in (q, k, v))))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any()


@pytest.mark.parametrize("v_grad", ["hard", "soft"])
def test_two_runs_give_the_same_bits(implementation, v_grad) -> None:
    q, k, v = qkv(Shape(T=50, B=1, G=1))
    attention = partial(kp.top1_element_attention, v_grad=v_grad, implementation=implementation)
    first, second = (value_and_grads(attention, q, k, v) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_negative_scales(implementation, scale) -> None:
    q, k, v = qkv(Shape(T=40, B=1, G=1))
    got = value_and_grads(partial(kp.top1_element_attention, scale=scale, implementation=implementation), q, k, v)
    want = value_and_grads(partial(reference.top1_element_attention, scale=scale), q, k, v)
    jax.tree.map(lambda a, b: assert_close(a, b, "float32"), got, want)


def test_evaluation_skips_the_softmax() -> None:
    q, k, v = qkv(Shape())
    jaxpr = jax.make_jaxpr(kp.top1_element_attention)(q, k, v).jaxpr
    assert count_primitive(jaxpr, "dot_general") == 1  # only q k^T
    assert count_primitive(jaxpr, "exp") == 0


def test_decode_equals_the_parallel_form(implementation) -> None:
    shape = Shape(T=40 if implementation == "triton" else 21, B=1)
    q, k, v = qkv(shape)
    want = kp.top1_element_attention(q, k, v)
    pad = [(0, 0), (0, 4), (0, 0), (0, 0)]
    k_cache, v_cache = (jnp.pad(x, pad, constant_values=jnp.nan) for x in (k, v))  # unwritten slots may hold any value
    step = jax.jit(lambda q, length: kp.top1_element_decode(q, k_cache, v_cache, length, implementation=implementation))
    for t in range(0, shape.T, shape.T // 8):
        np.testing.assert_array_equal(step(q[:, t], t + 1), want[:, t])
