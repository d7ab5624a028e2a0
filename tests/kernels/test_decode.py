"""Top-1 Chunk decoding: token by token equals the parallel form, for every position and cache length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from tests.kernels.common import Shape, assert_close, qkv


def decode_all(q, k, v, *, max_len: int, selection: str, chunk_size: int, with_table: bool) -> jax.Array:
    """Feeds the tokens one by one into a cache whose unwritten slots are NaN."""
    B, T, G, K = k.shape
    empty = (jnp.full((B, max_len, G, x.shape[-1]), jnp.nan, x.dtype) for x in (k, v))
    table = jnp.full((B, max_len // chunk_size, G, K), jnp.nan, jnp.float32)

    def step(cache, qkvt):
        k_cache, v_cache, table = cache
        q_t, k_t, v_t, t = qkvt
        k_cache, v_cache = k_cache.at[:, t].set(k_t), v_cache.at[:, t].set(v_t)
        table = kp.update_chunk_means(table, k_cache, t + 1, chunk_size=chunk_size)
        o = kp.top1_chunk_decode(
            q_t,
            k_cache,
            v_cache,
            t + 1,
            chunk_size=chunk_size,
            selection=selection,
            chunk_mean_BcGK=table if with_table else None,
        )
        return (k_cache, v_cache, table), o

    over_time = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v))
    _, o = jax.jit(lambda c, xs: jax.lax.scan(step, c, xs))((*empty, table), (*over_time, jnp.arange(T)))
    return jnp.moveaxis(o, 0, 1)


@pytest.mark.parametrize("max_len", [45, 48, 53])  # 53: the own chunk's slice would leave the cache
@pytest.mark.parametrize(("selection", "with_table"), [("exact", False), ("approx", True), ("approx", False)])
def test_equals_the_parallel_form(selection, with_table, max_len) -> None:
    q, k, v = qkv(Shape(T=45))
    o = decode_all(q, k, v, max_len=max_len, selection=selection, chunk_size=8, with_table=with_table)
    want = jax.jit(lambda *a: kp.top1_chunk_attention(*a, chunk_size=8, selection=selection))(q, k, v)
    assert_close(o, want, "float32")


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_cache_shorter_than_a_chunk(selection) -> None:
    q, k, v = qkv(Shape(T=10))
    o = decode_all(q, k, v, max_len=10, selection=selection, chunk_size=16, with_table=True)
    assert_close(o, kp.top1_chunk_attention(q, k, v, chunk_size=16, selection=selection), "float32")


def test_bfloat16_caches() -> None:
    q, k, v = qkv(Shape(T=40), dtype="bfloat16")
    o = decode_all(q, k, v, max_len=40, selection="approx", chunk_size=8, with_table=True)
    want = kp.top1_chunk_attention(q, k, v, chunk_size=8, selection="approx")
    assert o.dtype == jnp.bfloat16
    assert_close(o.astype(jnp.float32), want.astype(jnp.float32), "bfloat16")


def test_means_after_a_prefill_equal_the_running_ones() -> None:
    _, k, _ = qkv(Shape(T=43))
    table = jnp.zeros((2, 43 // 8, 2, 8), jnp.float32)
    for length in range(1, 44):
        table = kp.update_chunk_means(table, k, length, chunk_size=8)
    np.testing.assert_array_equal(table, kp.chunk_means(k, chunk_size=8))


def test_a_table_with_too_few_rows_is_named() -> None:
    q, k, v = qkv(Shape(T=40))
    with pytest.raises(ValueError, match="at least 5"):
        kp.top1_chunk_decode(
            q[:, 0], k, v, 3, chunk_size=8, selection="approx", chunk_mean_BcGK=jnp.zeros((2, 4, 2, 8))
        )
