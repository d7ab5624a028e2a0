"""Selection by a shortlist against a plain float64 definition.

The tests cover chunk tables and the choice of the best listed key.
"""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import xla_tiles
from kernels_pallas.select_chunk import mosaic_gpu, tables
from kernels_pallas.select_chunk import reference as select_reference
from kernels_pallas.select_chunk import triton as select_triton
from kernels_pallas.top1_chunk import reference
from kernels_pallas.top1_chunk import triton as chunk_triton
from kernels_pallas.triton import runtime
from tests import extras, support
from tests.kernels.common import (
    Shape,
    assert_close,
    chunk_attention,
    fast_jit,
    qkv,
    temporary_bytes,
    value_and_grads,
    with_grads,
)
from tests.kernels.test_decode import decode_all
from tests.kernels.test_triton_refusals import problem

TABLES = tuple(tables.N_ROWS)
one_table = pytest.mark.parametrize("table", support.slow_unless(lambda table: table == "mean_eigen", TABLES))


def table_score(q_K, k_CK, table: str, scale: float) -> float:
    """Return a table's score for a chunk, in float64 with numpy's eigenvalues."""
    mean_K = k_CK.mean(0)
    if table == "sub_means":
        return max(scale * run.mean(0) @ q_K for run in np.split(k_CK, 8))
    if table == "mean":
        return scale * mean_K @ q_K
    values, vectors = np.linalg.eigh((k_CK - mean_K).T @ (k_CK - mean_K) / len(k_CK))
    return scale * mean_K @ q_K + scale**2 * values[-1] * (vectors[:, -1] @ q_K) ** 2 / 2


def plain(q, k, *, chunk_size: int, table: str, shortlist: int, top_k: int) -> np.ndarray:
    """Select per query the chunks with the best listed keys: [B, T, H, k]."""
    (B, T, H, K), C, R = q.shape, chunk_size, q.shape[2] // k.shape[2]
    scale, sel = K**-0.5, np.full((B, T, H, top_k), -1)
    for b, t, h in np.ndindex(B, T, H):
        chunks = [k[b, c * C : (c + 1) * C, h // R] for c in range(t // C)]
        chunk_scores = [table_score(q[b, t, h], x, table, scale) for x in chunks]
        listed = sorted(range(len(chunks)), key=lambda c, chunk_scores=chunk_scores: (-chunk_scores[c], c))[:shortlist]
        best = {c: (chunks[c] @ q[b, t, h]).max() for c in listed}
        chosen = sorted(listed, key=lambda c, best=best: (-best[c], c))[:top_k]
        sel[b, t, h, : len(chosen)] = chosen
    return sel


# 101 tokens have at most six past chunks (size 16) or three (size 32).
CASES = [
    ("mean", 16, 1, 1),
    ("mean", 16, 3, 2),
    ("mean", 32, 2, 1),
    ("sub_means", 16, 2, 2),
    ("sub_means", 16, 6, 2),
    ("sub_means", 32, 1, 1),
    ("mean_eigen", 16, 5, 1),
    ("mean_eigen", 16, 4, 2),
    ("mean_eigen", 32, 2, 2),
]
# test_equals_the_reference covers the mean quickly; tie and decoding tests cover the eigenvectors.
QUICK = {("sub_means", 16, 2, 2)}


def separated_keys(shape: Shape) -> jax.Array:
    """Draw keys with a dominant direction per chunk.

    Power iteration then converges to the last digits.
    """
    rng = np.random.default_rng(5)
    direction = rng.normal(size=(shape.B, -(-shape.T // shape.C), 1, shape.G, shape.K))
    along = np.repeat(direction, shape.C, 2).reshape(shape.B, -1, shape.G, shape.K)[:, : shape.T]
    k = rng.normal(size=(shape.B, shape.T, shape.G, shape.K))
    return jnp.asarray(k + 2 * along * rng.normal(size=(shape.B, shape.T, shape.G, 1)), "float64")


@pytest.mark.parametrize(("table", "chunk", "shortlist", "top_k"), support.slow_unless(lambda *c: c in QUICK, CASES))
def test_equals_the_plain_definition(small_tiles, table, chunk, shortlist, top_k) -> None:
    shape = Shape(T=101, C=chunk)
    options = {"chunk_size": chunk, "selection": "shortlist", "shortlist": shortlist, "table": table, "top_k": top_k}
    with jax.enable_x64(True):
        q, _, v = qkv(shape, dtype="float64")
        k = separated_keys(shape)
        want = plain(np.asarray(q), np.asarray(k), chunk_size=chunk, table=table, shortlist=shortlist, top_k=top_k)
        want = want if top_k > 1 else want[..., 0]
        for f in (partial(kp.select_chunk, implementation="xla"), select_reference.select_chunk):
            np.testing.assert_array_equal(fast_jit(partial(f, **options))(q, k), want)
        # The gradient equals the gradient of attention to the selected chunks.
        got = value_and_grads(partial(chunk_attention, how="sorted", **options), q, k, v)
        attend = partial(reference.attend, sel_BTH=jnp.asarray(want, jnp.int32), chunk_size=chunk)
        jax.tree.map(partial(assert_close, dtype="float64"), got, value_and_grads(attend, q, k, v))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("table", support.slow_unless(lambda table: table == "mean", TABLES))
def test_equals_the_reference(small_tiles, table, dtype) -> None:
    """Both multiply the same inputs in float32.

    Lists have 3 of at most 12 past chunks.
    """
    q, k, _ = qkv(Shape(T=203), dtype=dtype)
    options = {"chunk_size": 16, "selection": "shortlist", "shortlist": 3, "table": table, "top_k": 2}
    got = np.asarray(fast_jit(partial(kp.select_chunk, implementation="xla", **options))(q, k))
    want = np.asarray(fast_jit(partial(select_reference.select_chunk, **options))(q, k))
    assert (got != want).any(-1).mean() < 2e-3  # rounding decides near ties: 3 of 1624 queries


KERNEL_CASES = [
    ("mean", Shape(T=101, C=16, B=1), 3, 2, None),
    ("mean", Shape(T=130, C=40, R=3, G=1, K=24), 2, 1, -0.5),  # a chunk in pieces; a negative scale reverses the order
    ("mean", Shape(B=1, T=300, C=128, R=1, G=1, K=64), 1, 1, None),
    ("sub_means", Shape(T=101, C=8, B=1), 4, 3, None),
    ("sub_means", Shape(B=1, T=70, C=32, G=1), 1, 1, 0.7),
    ("mean_eigen", Shape(B=1, T=101, C=16, G=1), 2, 1, -0.5),
    ("mean_eigen", Shape(T=66, C=3, B=1), 16, 4, 1.5),
]


@pytest.mark.parametrize("few_chunks", [0, 1000], ids=["sorted", "masked"])
@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("table", "shape", "shortlist", "top_k", "scale"), support.slow_unless(lambda *c: c[1].C == 16, KERNEL_CASES)
)
def test_kernels_equal_the_reference(
    monkeypatch, table, shape, shortlist, top_k, scale, dtype, implementation, few_chunks
) -> None:
    """Sort rows by candidate, or score all chunks.

    Scoring all chunks is faster if there are few.
    """
    extras.need("triton")
    from kernels_pallas.select_chunk.triton import select

    monkeypatch.setattr(select, "FEW_CHUNKS", few_chunks)
    q, k, _ = qkv(shape, dtype=dtype)
    options = {"chunk_size": shape.C, "selection": "shortlist", "scale": scale}
    options |= {"shortlist": shortlist, "table": table, "top_k": top_k}
    got = np.asarray(fast_jit(partial(kp.select_chunk, implementation=implementation, **options))(q, k))
    want = np.asarray(fast_jit(partial(select_reference.select_chunk, **options))(q, k))
    assert (got != want).reshape((*got.shape[:3], -1)).any(-1).mean() < 2e-3  # rounding decides near ties


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("table", "chunk", "dim", "shortlist", "top_k"),
    [
        ("mean", 128, 64, 4, 1),
        ("mean", 32, 128, 2, 2),
        ("sub_means", 64, 64, 4, 2),
        ("mean_eigen", 128, 96, 8, 1),
        ("mean", 256, 64, 16, 4),
    ],
)
def test_kernels_at_their_real_sizes(table, chunk, dim, shortlist, top_k, dtype) -> None:
    """One chunk is on most lists."""
    q, k, _ = qkv(Shape(B=2, T=9001, R=2, G=2, K=dim, C=chunk), dtype=dtype)
    k = k.at[:, chunk : 2 * chunk].add(jnp.asarray(0.3, dtype) * q[:, 7000:7001, ::2])
    options = {"chunk_size": chunk, "selection": "shortlist", "shortlist": shortlist, "table": table, "top_k": top_k}
    got, want = (jax.jit(partial(kp.select_chunk, implementation=name, **options))(q, k) for name in ("triton", "xla"))
    wrong = np.asarray(got != want).reshape(2, 9001, 4, -1).any(-1)
    assert wrong.mean() < 2e-3  # rounding decides near ties


@one_table
def test_longer_lists_find_no_fewer_best_keys(table) -> None:
    """A list of all chunks selects exactly.

    Shorter lists are exact for queries with no more chunks.
    """
    q, k, _ = qkv(Shape(T=101))

    def select(**options):
        return np.asarray(fast_jit(partial(kp.select_chunk, chunk_size=16, implementation="xla", **options))(q, k))

    want = select(selection="best_key")
    matches = np.zeros(want.shape, bool)
    for m in (1, 3, 6):
        sel = select(selection="shortlist", shortlist=m, table=table)
        assert (sel == want)[matches].all()
        matches = sel == want
        assert matches[:, : (m + 1) * 16].all()
        assert matches.all() == (m == 6)
    want = select(selection="best_key", top_k=2)
    np.testing.assert_array_equal(select(selection="shortlist", shortlist=10**9, table=table, top_k=2), want)


def sort_rows_by_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton sort rows by candidate, as for long sequences."""
    from kernels_pallas.select_chunk.triton import select

    monkeypatch.setattr(select, "FEW_CHUNKS", 0)


@pytest.mark.parametrize(
    ("table", "implementation", "few_chunks"),
    [
        *((table, name, few_chunks) for name, few_chunks in (("xla", True), ("triton", False)) for table in TABLES),
        ("mean", "triton", True),
    ],
)
def test_ties_go_to_the_smallest_chunk(small_tiles, monkeypatch, table, implementation, few_chunks) -> None:
    """Ties occur in the list and among best keys.

    Chunks 0 and 1 differ, later chunks repeat them.
    """
    if not few_chunks:
        extras.need("triton")
        sort_rows_by_candidate(monkeypatch)
    shape = Shape(T=100, C=16, B=1)
    rng = np.random.default_rng(0)
    pair = rng.integers(-2, 3, size=(32, shape.G, shape.K))
    k = jnp.asarray(np.tile(pair, (4, 1, 1))[None, : shape.T], jnp.float32)
    q = jnp.asarray(rng.integers(-2, 3, size=(1, shape.T, shape.heads, shape.K)), jnp.float32)
    options = {"chunk_size": 16, "selection": "shortlist", "table": table, "scale": 1.0}
    options["implementation"] = implementation
    select = jax.jit(partial(kp.select_chunk, shortlist=3, **options))
    sel, zero = select(q, k), np.asarray(select(jnp.zeros_like(q), k))
    assert (zero[:, 16:] == 0).all()
    assert (np.asarray(sel)[:, 32:] <= 1).all()
    assert {0, 1} <= set(np.unique(sel).tolist())
    twice = np.asarray(jax.jit(partial(kp.select_chunk, shortlist=3, top_k=2, **options))(jnp.zeros_like(q), k))
    assert (twice[:, 32:] == [0, 1]).all()


@pytest.mark.parametrize(
    ("table", "how", "few_chunks"),
    [
        *support.slow_unless(lambda table, *_: table == "mean_eigen", [(t, "sorted", True) for t in TABLES]),
        ("mean", "triton", True),
        ("mean", "triton", False),
    ],
)
def test_causal_to_the_last_bit(small_tiles, monkeypatch, table, how, few_chunks) -> None:
    if not few_chunks:
        extras.need("triton")
        sort_rows_by_candidate(monkeypatch)
    q, k, v = qkv(Shape(T=101, B=1, G=1 if how == "triton" else 2), gain=2)
    options = {"chunk_size": 16, "selection": "shortlist", "shortlist": 2, "table": table}
    run = jax.jit(partial(chunk_attention, how=how, **options))
    before = np.asarray(run(q, k, v))
    for t in (47, 100) if how == "triton" else (1, 16, 47, 80, 100):
        after = np.asarray(run(*(x.at[:, t].multiply(-3) for x in (q, k, v))))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any()


DECODED = [
    ("mean", True, 1, 1, 5),
    ("sub_means", True, 3, 2, 8),
    ("mean_eigen", True, 2, 1, 0),
    ("mean", False, 2, 2, 3),
]
DECODED += [("mean_eigen", False, 9, 2, 5)]


@pytest.mark.parametrize(
    ("table", "with_table", "shortlist", "top_k", "spare", "implementation"),
    support.slow_unless(lambda *case: case[:5] in DECODED[1:4], [(*case, "xla") for case in DECODED])
    + support.slow_unless(lambda table, *_: table == "mean", [(*case, "triton") for case in DECODED]),
)
def test_decoding_equals_the_parallel_form(table, with_table, shortlist, top_k, spare, implementation) -> None:
    """Decode into a cache with `spare` empty slots and a table initialised to NaN."""
    T = 45 if implementation == "xla" else 29
    q, k, v = qkv(Shape(T=T))
    options = {"selection": "shortlist", "chunk_size": 8, "shortlist": shortlist, "table": table, "top_k": top_k}
    o = decode_all(q, k, v, max_len=T + spare, with_table=with_table, implementation=implementation, **options)
    assert_close(o, jax.jit(partial(kp.top1_chunk_attention, **options))(q, k, v), "float32")


@one_table
def test_prefill_rows_equal_running_rows(table) -> None:
    k = qkv(Shape(T=43), dtype="bfloat16")[1]
    want = kp.chunk_table(k, chunk_size=8, table=table)
    update = jax.jit(partial(kp.update_chunk_table, chunk_size=8, table=table))
    running = jnp.zeros(want.shape, jnp.float32)
    for length in range(1, 44):
        running = update(running, k, length)
    assert want.dtype == jnp.float32
    np.testing.assert_allclose(running, want, rtol=0, atol=2e-6)


def test_the_leading_eigenvector() -> None:
    """Its length is the square root of the eigenvalue; for equal keys it is zero."""
    k = np.random.default_rng(0).normal(size=(7, 24, 6))
    k[:, :, 1] *= 3
    k[0] = k[0, :1]
    row = np.asarray(tables.rows(jnp.asarray(k, jnp.float32), "mean_eigen"), np.float64)
    np.testing.assert_allclose(row[:, 0], k.mean(1), atol=1e-6)
    np.testing.assert_allclose(row[0, 1], 0, atol=1e-6)
    centred = k - k.mean(1, keepdims=True)
    values, vectors = np.linalg.eigh(np.einsum("nck,ncl->nkl", centred, centred) / 24)
    want = np.sqrt(values[:, -1:]) * vectors[..., -1]
    sign = np.sign((want * row[:, 1]).sum(-1, keepdims=True))
    np.testing.assert_allclose(row[1:, 1], (sign * want)[1:], atol=1e-5)


@pytest.mark.slow
def test_memory_grows_linearly_with_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS", {})
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS_DEFAULT", 2**14)
    op = with_grads(partial(chunk_attention, how="sorted", selection="shortlist", table="mean_eigen"))
    two, four = (temporary_bytes(op, *[jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)] * 3) for T in (2048, 4096))
    assert four < 2.2 * two


def test_memory_of_the_kernels_grows_linearly_with_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the kernels' output bytes from 16,384 tokens on.

    From there, sort tiles grow with the number of chunks.
    """
    extras.need("triton")
    from kernels_pallas.select_chunk.triton import select

    def recorder(kernel, *operands, out_shape, **options):
        written.extend(math.prod(x.shape) * x.dtype.itemsize for x in out_shape)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in out_shape)

    monkeypatch.setattr(runtime, "launch", recorder)
    total, options = [], {"chunk_size": 8, "selection": "shortlist", "shortlist": tables.Shortlist(2, "mean")}
    for T in (2**14, 2**15):
        written: list[int] = []
        q = jax.ShapeDtypeStruct((1, T, 1, 8), "float32")
        jax.eval_shape(partial(select.select, scale=1.0, **options), q, q)
        total.append(sum(written))
    assert 1.9 < total[1] / total[0] < 2.1


def test_refusals_name_a_supporting_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    long = partial(problem, T=2000, chunk_size=64, selection="shortlist", top_k=1)
    listed = long(shortlist=tables.Shortlist(4, "mean"))
    assert mosaic_gpu.BACKEND.refusal(listed) is not None
    for backend in (select_triton.BACKEND, chunk_triton.DECODE_BACKEND):
        assert backend.refusal(listed) is None
        refusal = backend.refusal(long(shortlist=tables.Shortlist(17, "mean")))
        assert re.search(" 16 .*shortlist=17; implementation='xla'", str(refusal))
        # The best key of all chunks needs no list.
        assert backend.refusal(long(shortlist=tables.Shortlist(31, "mean"))) is None
    # Attention does not select; it uses another backend's selection.
    assert chunk_triton.BACKEND.refusal(long(shortlist=tables.Shortlist(17, "mean"))) is None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"shortlist": 0}, "shortlist=0 .*top_k=1: .* 1 or more"),
        ({"shortlist": 2, "top_k": 3}, "shortlist=2 .*top_k=3: .* 3 or more"),
        ({"table": "means"}, "table 'means'.*'mean'"),
        ({"table": "sub_means", "chunk_size": 12}, "chunk_size=12 .* 8, .*table='mean'"),
    ],
)
def test_wrong_settings_name_the_fix(settings, match) -> None:
    q, k, v = qkv(Shape(T=40))
    options = {"chunk_size": 8, "selection": "shortlist"} | settings
    calls = (partial(kp.top1_chunk_attention, q, k, v), partial(kp.select_chunk, q, k))
    for call in (*calls, partial(kp.top1_chunk_decode, q[:, 0], k, v, 4)):
        with pytest.raises(ValueError, match=match):
            call(**options)
    # Other selections ignore these arguments.
    assert kp.select_chunk(q, k, **(options | {"selection": "approx"})).shape[:3] == (2, 40, 4)


def test_a_table_of_another_shape_is_named() -> None:
    q, k, v = qkv(Shape(T=40))
    table = kp.chunk_table(k, chunk_size=8, table="mean")
    options = {"chunk_size": 8, "selection": "shortlist", "table": "mean_eigen", "shortlist": 1}
    with pytest.raises(ValueError, match=r"chunk_table .*\[2, at least 5, 2, 2, 8\]"):
        kp.top1_chunk_decode(q[:, 0], k, v, 3, chunk_table_BcGPK=table, **options)
