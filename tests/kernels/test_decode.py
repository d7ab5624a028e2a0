"""Top-1 Chunk decoding equals the parallel form.

The tests cover every position and cache length.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.select_chunk.tables import N_ROWS
from tests import support
from tests.kernels.common import Shape, assert_close, fast_jit, qkv


def decode_all(
    q,
    k,
    v,
    *,
    max_len: int,
    selection: str,
    chunk_size: int,
    with_table: bool,
    implementation: str = "xla",
    **rule,
) -> jax.Array:
    """Decode token by token into a cache with NaN in its unwritten slots."""
    B, T, G, K = k.shape
    empty = (jnp.full((B, max_len, G, x.shape[-1]), jnp.nan, x.dtype) for x in (k, v))
    kind = rule.get("table", "mean")
    table = jnp.full((B, max_len // chunk_size, G, N_ROWS[kind], K), jnp.nan, jnp.float32)

    def step(cache, qkvt):
        k_cache, v_cache, table = cache
        q_t, k_t, v_t, t = qkvt
        k_cache, v_cache = k_cache.at[:, t].set(k_t), v_cache.at[:, t].set(v_t)
        table = kp.update_chunk_table(table, k_cache, t + 1, chunk_size=chunk_size, table=kind)
        name, x = ("chunk_table_BcGPK", table) if selection == "shortlist" else ("chunk_mean_BcGK", table[..., 0, :])
        o = kp.top1_chunk_decode(
            q_t,
            k_cache,
            v_cache,
            t + 1,
            chunk_size=chunk_size,
            selection=selection,
            implementation=implementation,
            **{name: x if with_table else None},
            **rule,
        )
        return (k_cache, v_cache, table), o

    over_time = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v))
    _, o = jax.jit(lambda c, xs: jax.lax.scan(step, c, xs))((*empty, table), (*over_time, jnp.arange(T)))
    return jnp.moveaxis(o, 0, 1)


# Selection, and whether the call has a table of means.
KINDS = [("exact", False), ("best_key", False), ("approx", True), ("approx", False)]
SPARE = [8, 5, 3, 0]  # empty slots; with 0, the local chunk's slice would leave the cache


@pytest.mark.parametrize(
    ("selection", "with_table", "spare", "implementation"),
    support.slow_unless(
        lambda selection, table, spare, _: spare in (8, 0), [(*kind, spare, "xla") for kind in KINDS for spare in SPARE]
    )
    + [
        pytest.param(*kind, spare, "triton", marks=() if kind[0] == "exact" else pytest.mark.slow)
        for kind, spare in zip(KINDS, SPARE, strict=True)
    ],
)
def test_equals_the_parallel_form(selection, with_table, spare, implementation) -> None:
    T, B = (45, 2) if implementation == "xla" else (21, 1)
    q, k, v = qkv(Shape(T=T, B=B))
    options = {"selection": selection, "chunk_size": 8, "implementation": implementation}
    o = decode_all(q, k, v, max_len=T + spare, with_table=with_table, **options)
    want = jax.jit(lambda *a: kp.top1_chunk_attention(*a, chunk_size=8, selection=selection))(q, k, v)
    assert_close(o, want, "float32")


@pytest.mark.parametrize("selection", ["exact", "best_key", "approx"])
def test_cache_shorter_than_a_chunk(selection, implementation) -> None:
    q, k, v = qkv(Shape(T=10))
    options = {"selection": selection, "chunk_size": 16, "implementation": implementation}
    o = decode_all(q, k, v, max_len=10, with_table=True, **options)
    whole = fast_jit(partial(kp.top1_chunk_attention, chunk_size=16, selection=selection))
    assert_close(o, whole(q, k, v), "float32")


@pytest.mark.parametrize("selection", ["exact", "best_key", "approx"])
def test_bfloat16_caches(selection, implementation) -> None:
    q, k, v = qkv(Shape(T=20, B=1), dtype="bfloat16")
    options = {"selection": selection, "chunk_size": 8, "implementation": implementation}
    o = decode_all(q, k, v, max_len=20, with_table=True, **options)
    want = fast_jit(partial(kp.top1_chunk_attention, chunk_size=8, selection=selection))(q, k, v)
    assert o.dtype == jnp.bfloat16
    assert_close(o.astype(jnp.float32), want.astype(jnp.float32), "bfloat16")


def test_prefill_means_equal_running_means() -> None:
    _, k, _ = qkv(Shape(T=43))
    table = jnp.zeros((2, 43 // 8, 2, 8), jnp.float32)
    for length in range(1, 44):
        table = kp.update_chunk_means(table, k, length, chunk_size=8)
    np.testing.assert_array_equal(table, kp.chunk_means(k, chunk_size=8))


def test_means_of_bfloat16_keys_are_float32() -> None:
    _, k, _ = qkv(Shape(T=19), dtype="bfloat16")
    want = np.asarray(k, np.float64)[:, :16].reshape(2, 2, 8, 2, 8).mean(2)
    running = jnp.zeros(want.shape, jnp.float32)
    for length in (8, 16, 19):
        running = kp.update_chunk_means(running, k, length, chunk_size=8)
    for table in (kp.chunk_means(k, chunk_size=8), running):
        assert table.dtype == jnp.float32
        np.testing.assert_allclose(table, want, rtol=0, atol=1e-6)


def test_ties_go_to_the_smallest_chunk(selection, implementation) -> None:
    """Small integers make equal scores bitwise equal.

    Four splits of the context repeat one chunk.
    """
    rng = np.random.default_rng(0)
    k = jnp.asarray(np.tile(rng.integers(-2, 3, size=(1, 8, 2, 8)), (1, 9, 1, 1)), jnp.float32)
    v = jnp.asarray(rng.normal(size=k.shape), jnp.float32)
    q = jnp.asarray(rng.integers(-2, 3, size=(1, 4, 8)), jnp.float32)
    options = {"chunk_size": 8, "selection": selection, "scale": 1.0, "implementation": implementation}
    decode = fast_jit(partial(kp.top1_chunk_decode, **options))
    o = decode(q, k, v, 70)
    np.testing.assert_array_equal(o, decode(q, k, v.at[:, 8:64].set(0), 70))
    assert (o != decode(q, k, v.at[:, :8].set(0), 70)).any()


@pytest.mark.slow
def test_vmap_over_caches(selection, implementation) -> None:
    q, k, v = (jnp.stack(x) for x in zip(*(qkv(Shape(T=40), seed=s) for s in range(2)), strict=True))
    options = {"chunk_size": 8, "selection": selection, "implementation": implementation}
    lengths = jnp.asarray([40, 21])

    def step(q, k, v, length):
        return kp.top1_chunk_decode(q, k, v, length, **options)

    got = fast_jit(jax.vmap(step))(q[:, :, 39], k, v, lengths)
    one = fast_jit(step)
    want = jnp.stack([one(q[i, :, 39], k[i], v[i], lengths[i]) for i in range(2)])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    got = fast_jit(jax.vmap(step, in_axes=(0, None, None, None)))(q[:, :, 39], k[0], v[0], 40)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("S", "length", "dim"), [(5000, 4999, 64), (5000, 700, 64), (3001, 3001, 128), (2000, 1, 96)])
def test_kernels_at_their_real_sizes(S, length, dim, dtype, selection) -> None:
    q, k, v = qkv(Shape(B=3, T=S, R=2, G=3, K=dim, V=dim), dtype=dtype)
    outs = {
        name: kp.top1_chunk_decode(q[:, -1], k, v, length, selection=selection, implementation=name)
        for name in ("xla", "triton")
    }
    assert_close(outs["triton"].astype(jnp.float32), outs["xla"].astype(jnp.float32), dtype)
    got, want = (kp.top1_element_decode(q[:, -1], k, v, length, implementation=name) for name in ("triton", "xla"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("S", "length", "dim"), [(5000, 4999, 64), (5000, 700, 64), (30000, 29001, 128), (900, 1, 96)])
@pytest.mark.parametrize(
    ("selection", "top_k", "table"),
    [("exact", 8, "mean"), ("best_key", 2, "mean"), ("approx", 4, "mean")]
    + [("shortlist", 1, table) for table in N_ROWS],
)
def test_kernels_of_several_chunks_at_their_real_sizes(S, length, dim, selection, top_k, table, dtype) -> None:
    q, k, v = qkv(Shape(B=3, T=S, R=2, G=3, K=dim, V=dim), dtype=dtype)
    options = {"selection": selection, "top_k": top_k, "table": table}
    got, want = (
        kp.top1_chunk_decode(q[:, -1], k, v, length, implementation=name, **options).astype(jnp.float32)
        for name in ("triton", "xla")
    )
    assert_close(got, want, dtype)


def test_a_table_with_too_few_rows_is_named() -> None:
    q, k, v = qkv(Shape(T=40))
    with pytest.raises(ValueError, match="at least 5"):
        kp.top1_chunk_decode(
            q[:, 0], k, v, 3, chunk_size=8, selection="approx", chunk_mean_BcGK=jnp.zeros((2, 4, 2, 8))
        )
