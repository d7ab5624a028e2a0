"""Several selected chunks per query, and random selection.

Both are compared with a plain float64 definition.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import xla_tiles
from kernels_pallas.select_chunk import mosaic_gpu
from kernels_pallas.select_chunk import reference as select_reference
from kernels_pallas.select_chunk import triton as select_triton
from kernels_pallas.top1_chunk import reference
from kernels_pallas.top1_chunk import triton as chunk_triton
from kernels_pallas.triton import runtime
from tests import support
from tests.kernels.common import (
    NAMES,
    SCHEDULES,
    Shape,
    assert_close,
    chunk_attention,
    cotangent,
    fast_jit,
    qkv,
    temporary_bytes,
    value_and_grads,
    with_grads,
)
from tests.kernels.test_decode import decode_all
from tests.kernels.test_triton_refusals import problem

RULES = ("exact", "best_key", "approx", "random")


def random_score(position: int, head: int, chunk: int) -> int:
    """Compute the hash with Python integers."""
    bits = 0
    for x in (position, head, chunk):
        bits = (bits + x + 0x9E3779B9) % 2**32
        bits = (bits ^ (bits >> 16)) * 0x85EBCA6B % 2**32
        bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 % 2**32
        bits ^= bits >> 16
    return bits >> 8


def plain(q, k, v, do, *, chunk_size: int, selection: str, top_k: int):
    """Return output and gradients, computed query by query.

    One softmax covers the best past chunks and the local chunk.
    """
    (B, T, H, K), C = q.shape, chunk_size
    scale, R = K**-0.5, H // k.shape[2]
    sel = np.full((B, T, H, top_k), -1)
    o = np.zeros((B, T, H, v.shape[-1]))
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, t, h in np.ndindex(B, T, H):
        g, own = h // R, t // C
        s = scale * k[b, :, g] @ q[b, t, h]
        score = []
        for c in range(own):
            of_chunk = s[c * C : (c + 1) * C]
            if selection == "exact":
                score.append(np.exp(of_chunk).sum())
            elif selection == "best_key":
                score.append(of_chunk.max())
            elif selection == "approx":
                score.append(k[b, c * C : (c + 1) * C, g].mean(0) @ q[b, t, h])
            else:
                score.append(random_score(t, h, c))
        chosen = sorted(range(own), key=lambda c, score=score: (-score[c], c))[:top_k]
        sel[b, t, h, : len(chosen)] = chosen
        at = [j for c in chosen for j in range(c * C, (c + 1) * C)] + list(range(own * C, t + 1))
        p = np.exp(s[at] - s[at].max())
        p /= p.sum()
        o[b, t, h] = p @ v[b, at, g]
        ds = scale * p * (v[b, at, g] @ do[b, t, h] - o[b, t, h] @ do[b, t, h])
        dq[b, t, h] = ds @ k[b, at, g]
        dk[b, at, g] += np.outer(ds, q[b, t, h])
        dv[b, at, g] += np.outer(p, do[b, t, h])
    return sel, o, (dq, dk, dv)


def check(f, shape: Shape, *, selection: str, top_k: int) -> None:
    options = {"chunk_size": shape.C, "selection": selection, "top_k": top_k}
    with jax.enable_x64(True):
        q, k, v = qkv(shape, dtype="float64")
        got = value_and_grads(partial(f, **options), q, k, v)
        do = cotangent(got[0])
        sel, *want = plain(*(np.asarray(x) for x in (q, k, v, do)), **options)
        for select in (partial(kp.select_chunk, implementation="xla"), select_reference.select_chunk):
            got_sel = fast_jit(partial(select, **options))(q, k)
            np.testing.assert_array_equal(got_sel, sel if top_k > 1 else sel[..., 0])
        jax.tree.map(lambda a, b: assert_close(a, b, "float64"), got, tuple(want))


QUICK = {("exact", 2, "masked"), ("best_key", 4, "sorted"), ("approx", 8, "masked"), ("random", 2, "sorted")}


@pytest.mark.parametrize(
    ("selection", "top_k", "schedule"),
    support.slow_unless(
        lambda *case: case in QUICK, [(r, k, s) for r in RULES for k in (1, 2, 4, 8) for s in SCHEDULES]
    ),
)
def test_equals_the_plain_definition(small_tiles, selection, top_k, schedule) -> None:
    """61 tokens in chunks of 8 have at most seven past chunks, fewer than 8."""
    check(partial(chunk_attention, how=schedule), Shape(T=61, C=8), selection=selection, top_k=top_k)


@pytest.mark.parametrize(
    ("length", "chunk", "top_k"),
    support.slow_unless(lambda _, chunk, top_k: (chunk, top_k) == (32, 4), [(299, 64, 2), (541, 128, 2), (541, 32, 4)]),
)
def test_chunk_sizes(length, chunk, top_k) -> None:
    """The public function chooses its schedule by length."""
    f = partial(kp.top1_chunk_attention, implementation="xla")
    check(f, Shape(B=1, G=1, T=length, C=chunk), selection="exact", top_k=top_k)


def past_chunks(shape: Shape, n_chunks: int) -> jax.Array:
    """Draw different past chunks per query and head, often fewer than exist, or none."""
    rng = np.random.default_rng(0)
    sel = np.full((shape.B, shape.T, shape.heads, n_chunks), -1, np.int32)
    for at in np.ndindex(sel.shape[:3]):
        chosen = rng.permutation(at[1] // shape.C)[: rng.integers(0, n_chunks, endpoint=True)]
        sel[at][: len(chosen)] = chosen
    return jnp.asarray(sel)


@pytest.mark.parametrize(("length", "n_chunks"), [(61, 3), (61, 1), (523, 2)])
def test_chunks_of_the_caller(length, n_chunks) -> None:
    """The caller may pass any distinct past chunks; the lengths cover both schedules."""
    shape = Shape(B=1, T=length, C=8, G=2, R=2)
    sel, options = past_chunks(shape, n_chunks), {"chunk_size": 8, "scale": 0.7}
    with jax.enable_x64(True):
        q, k, v = qkv(shape, dtype="float64")
        got = value_and_grads(lambda q, k, v: kp.selected_chunk_attention(q, k, v, sel, **options), q, k, v)
        want = value_and_grads(lambda q, k, v: reference.attend(q, k, v, sel, **options), q, k, v)
        jax.tree.map(lambda a, b: assert_close(a, b, "float64"), got, want)


@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("shape", "n_chunks"),
    [
        (Shape(B=2, T=29, C=8, R=1, G=1), 5),  # more than exist
        (Shape(B=1, T=45, C=8), 3),
        (Shape(B=1, T=29, C=8, R=3, G=1), 1),  # one per query, or none
        (Shape(B=1, T=90, C=40, R=1, G=1), 2),  # in pieces, and not a multiple of a tile
        (Shape(B=1, T=7, C=8), 2),  # no second chunk
    ],
)
def test_kernels_attend_to_chunks_of_the_caller(shape, n_chunks, dtype, implementation) -> None:
    """Compare with the definition in float32, for the same inputs."""
    sel, options = past_chunks(shape, n_chunks), {"chunk_size": shape.C, "scale": 0.7}
    q, k, v = qkv(shape, dtype=dtype)
    f = partial(kp.selected_chunk_attention, implementation=implementation, **options)
    got = value_and_grads(lambda q, k, v: f(q, k, v, sel), q, k, v)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    want = value_and_grads(lambda q, k, v: reference.attend(q, k, v, sel, **options), *wide)
    jax.tree.map(lambda a, b: assert_close(a, b, dtype), got, want)
    again = value_and_grads(lambda q, k, v: f(q, k, v, sel), q, k, v)
    jax.tree.map(np.testing.assert_array_equal, again, got)


@pytest.mark.parametrize("shape", [Shape(B=1, T=45, C=8, R=3), Shape(B=2, T=90, C=40, R=2, G=1)])
def test_heads_share_a_selection(shape, implementation) -> None:
    """A selection per key-value head equals its copies per head."""
    sel = past_chunks(shape, 2)[:, :, :: shape.R]
    q, k, v = qkv(shape)
    options = {"chunk_size": shape.C, "implementation": implementation}

    def attend(q, k, v, copies):
        return kp.selected_chunk_attention(q, k, v, jnp.repeat(sel, copies, axis=2), **options)

    got, want = (value_and_grads(partial(attend, copies=copies), q, k, v) for copies in (1, shape.R))
    np.testing.assert_array_equal(got[0], want[0])
    jax.tree.map(lambda a, b: assert_close(a, b, "float32"), got, want)


@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize(
    ("selection", "shape", "dtype", "top_k"),
    [
        ("approx", Shape(B=1, T=61, C=8), "bfloat16", 3),
        ("approx", Shape(B=1, T=60, C=3, R=2, G=1), "float32", 5),  # several tiles of means
        ("approx", Shape(B=1, T=29, C=8, R=1), "float32", 5),  # more than exist
        ("approx", Shape(B=1, T=7, C=8), "bfloat16", 2),
        ("exact", Shape(B=1, T=61, C=8), "bfloat16", 2),
        ("exact", Shape(B=1, T=300, C=64, R=1, G=1, K=64), "float32", 4),
        ("best_key", Shape(B=1, T=60, C=3, R=3, G=1), "float32", 8),
        ("best_key", Shape(B=1, T=170, C=32, R=1, G=1), "bfloat16", 4),
        ("best_key_int8", Shape(B=1, T=61, C=8, G=1), "bfloat16", 8),  # more than exist
        ("best_key_int8", Shape(B=1, T=300, C=128, R=1, G=1, K=64), "float32", 2),
    ],
)
def test_kernels_select_several(selection, shape, dtype, top_k, implementation) -> None:
    """The selected chunks have the largest scores, in order.

    Only queries with enough past chunks are compared.
    """
    q, k, _ = qkv(shape, dtype=dtype)
    check_selected(q, k, implementation, chunk_size=shape.C, selection=selection, top_k=top_k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("chunk", "dim", "top_k"), [(128, 64, 2), (64, 128, 4), (128, 64, 8), (32, 96, 16)])
@pytest.mark.parametrize("selection", ["exact", "best_key", "best_key_int8", "approx"])
def test_kernels_select_several_at_their_real_sizes(selection, chunk, dim, top_k, dtype) -> None:
    q, k, _ = qkv(Shape(B=2, T=4001, R=2, G=2, K=dim), dtype=dtype)
    # The exact selection approximates exponentials with errors of 8e-5.
    error = 3e-4 if selection == "exact" else 2e-5
    check_selected(q, k, "triton", chunk_size=chunk, selection=selection, top_k=top_k, error=error)


@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize(("gain", "chunk", "size"), [(30.0, 0, 1.0), (100.0, 0, 5.0), (1e3, 2, 1e3)])
def test_extreme_masses_after_the_first_chunk(gain, chunk, size, implementation) -> None:
    """Masses are relative to chunk 0's largest key.

    If this key is large, other masses underflow to 0 in float32; if small, they overflow.
    """
    q, k, _ = qkv(Shape(B=1, T=75, C=16, K=16, G=1), gain=gain)
    k = k.at[:, 16 * chunk : 16 * chunk + 16].multiply(size)
    check_selected(q, k, implementation, chunk_size=16, selection="exact", top_k=4)


def check_selected(q, k, implementation: str, *, top_k: int, error: float = 1e-5, **options) -> None:
    T, C = q.shape[1], options["chunk_size"]
    sel = np.asarray(kp.select_chunk(q, k, implementation=implementation, top_k=top_k, **options))
    assert sel.shape == (*q.shape[:3], top_k)
    n_past = np.arange(T)[:, None, None] // C
    np.testing.assert_array_equal(sel >= 0, np.broadcast_to(np.arange(top_k) < n_past, sel.shape))
    assert (sel < n_past).all()
    score = np.asarray(select_reference.chunk_scores(q, k, **options))
    best = -np.sort(-score, axis=-1)[..., :top_k]
    is_there = sel[..., : best.shape[-1]] >= 0
    got = np.take_along_axis(score, np.maximum(sel[..., : best.shape[-1]], 0), -1)
    np.testing.assert_allclose(got[is_there], best[is_there], rtol=1e-6, atol=error)  # near ties may swap
    in_order = np.sort(np.where(sel < 0, -1 - np.arange(top_k), sel), axis=-1)
    assert (np.diff(in_order, axis=-1) != 0).all(), "a chunk was selected twice"


def test_the_dense_reference_matches_the_definition() -> None:
    check(reference.top1_chunk_attention, Shape(T=45, C=8), selection="approx", top_k=3)


@pytest.mark.parametrize(
    ("selection", "top_k", "implementation"),
    [("exact", 10**9, None), ("approx", 10**9, None), ("exact", 16, "triton"), ("approx", 16, "triton")],
)
def test_selecting_all_chunks_equals_full_attention(selection, top_k, implementation) -> None:
    q, k, v = qkv(Shape(B=1, T=61, C=8, V=8, G=2 if implementation is None else 1))
    options = {"chunk_size": 8, "selection": selection, "top_k": top_k, "implementation": implementation}
    got = fast_jit(partial(kp.top1_chunk_attention, **options))(q, k, v)
    assert_close(got, kp.causal_attention(q, k, v, implementation="xla"), "float32")


@pytest.mark.parametrize(
    ("selection", "implementation"),
    [(rule, name) for rule in ("exact", "best_key", "best_key_int8", "approx") for name in ("xla", "triton")],
)
def test_ties_go_to_the_smallest_chunks(small_tiles, selection, implementation) -> None:
    shape = Shape(T=64, C=8, B=1)
    q, k, _ = qkv(shape)
    options = {"chunk_size": 8, "selection": selection, "top_k": 3, "scale": 1.0}
    select = jax.jit(partial(kp.select_chunk, implementation=implementation, **options))
    sel = np.asarray(select(jnp.zeros_like(q), k))
    own_T11 = np.arange(shape.T)[:, None, None] // 8
    np.testing.assert_array_equal(
        sel[0], np.broadcast_to(np.where(np.arange(3) < own_T11, np.arange(3), -1), sel[0].shape)
    )
    # Chunks 0 and 1 differ, later chunks repeat them. Small integers make equal scores bitwise equal.
    rng = np.random.default_rng(0)
    pair = rng.integers(-2, 3, size=(16, shape.G, shape.K))
    k = jnp.asarray(np.tile(pair, (4, 1, 1))[None], jnp.float32)
    q = jnp.asarray(rng.integers(-2, 3, size=q.shape), jnp.float32)
    want = select_reference.select_chunk(q, k, **options)
    np.testing.assert_array_equal(select(q, k), want)


CAUSAL = [("exact", "masked"), ("approx", "sorted"), ("random", "sorted"), ("approx", "triton"), ("exact", "triton")]


@pytest.mark.parametrize(
    ("selection", "schedule"), support.slow_unless(lambda *case: case not in (CAUSAL[0], CAUSAL[2]), CAUSAL)
)
def test_causal_to_the_last_bit(small_tiles, selection, schedule) -> None:
    """Changing token t leaves earlier outputs bitwise equal."""
    q, k, v = qkv(Shape(T=61, C=8, B=1, G=1 if schedule == "triton" else 2), gain=2)
    run = jax.jit(partial(chunk_attention, chunk_size=8, selection=selection, top_k=3, how=schedule))
    before = np.asarray(run(q, k, v))
    for t in (8, 23, 60) if schedule == "triton" else (1, 8, 23, 40, 60):
        after = np.asarray(run(*(x.at[:, t].multiply(-3) for x in (q, k, v))))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any()


DECODED = [
    ("exact", False, 2, 5),
    ("best_key", False, 4, 0),
    ("approx", True, 2, 8),
    ("approx", False, 8, 3),
    ("random", False, 1, 5),
    ("random", True, 3, 0),
]


@pytest.mark.parametrize(
    ("selection", "with_table", "top_k", "spare", "implementation"),
    support.slow_unless(lambda *case: case[:4] in DECODED[2:5], [(*case, "xla") for case in DECODED])
    + [(*case, "triton") for case in DECODED[:4]],
)
def test_decoding_equals_the_parallel_form(selection, with_table, top_k, spare, implementation) -> None:
    """Decode into a cache with `spare` empty slots.

    Every fourth case selects more chunks than exist.
    """
    T = 45 if implementation == "xla" else 29
    q, k, v = qkv(Shape(T=T))
    options = {"selection": selection, "chunk_size": 8, "top_k": top_k}
    o = decode_all(q, k, v, max_len=T + spare, with_table=with_table, implementation=implementation, **options)
    assert_close(o, jax.jit(partial(kp.top1_chunk_attention, **options))(q, k, v), "float32")


@pytest.mark.parametrize("selection", ["exact", "best_key", "approx", "shortlist"])
def test_decoding_breaks_ties_by_the_smallest_chunks(selection, implementation) -> None:
    """The query is zero; in the interpreter the eight past chunks form four shares."""
    q, k, v = qkv(Shape(B=1, T=70))
    options = {"chunk_size": 8, "selection": selection, "top_k": 2, "implementation": implementation}
    decode = fast_jit(partial(kp.top1_chunk_decode, jnp.zeros_like(q[:, 0]), k, length=70, **options))
    o = np.asarray(decode(v_BSGV=v))
    np.testing.assert_array_equal(o, decode(v_BSGV=v.at[:, 16:64].set(0)))
    for chunk in (0, 1):
        assert (o != decode(v_BSGV=v.at[:, 8 * chunk : 8 * chunk + 8].set(0))).any()


def test_decoding_into_a_cache_shorter_than_a_chunk() -> None:
    q, k, v = qkv(Shape(T=10))
    options = {"selection": "random", "chunk_size": 16, "top_k": 2}
    o = decode_all(q, k, v, max_len=10, with_table=True, **options)
    assert_close(o, fast_jit(partial(kp.top1_chunk_attention, **options))(q, k, v), "float32")


def test_random_selection_depends_only_on_position_and_head() -> None:
    """Queries, keys, batch entry and length have no effect.

    A query's chunks differ, and so do heads.
    """
    shape = Shape(T=803, C=8)
    options = {"chunk_size": 8, "selection": "random", "top_k": 2}
    select = jax.jit(partial(kp.select_chunk, **options))
    (q, k, _), (other_q, other_k, _) = qkv(shape), qkv(shape, seed=1)
    sel = np.asarray(select(q, k))
    np.testing.assert_array_equal(sel, select(other_q, other_k))
    np.testing.assert_array_equal(sel[:, :300], select(q[:, :300], k[:, :300]))
    np.testing.assert_array_equal(sel[0], sel[1])
    sel = sel[0, 16:]  # from here on, at least two past chunks exist
    assert (sel[..., 0] != sel[..., 1]).all()
    assert (sel[:, 0] != sel[:, 1]).any()
    # Chunks are drawn evenly: relative positions are uniform in [0, 1), within four standard deviations.
    own_T11 = (np.arange(16, 803) // 8)[:, None, None]
    share = ((sel + 0.5) / own_T11)[-400:].ravel()
    assert abs(share.mean() - 0.5) < 4 * np.sqrt(1 / 12 / share.size)
    assert abs((share < 0.25).mean() - 0.25) < 4 * np.sqrt(3 / 16 / share.size)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", support.slow_unless(lambda schedule: schedule == "sorted", SCHEDULES))
def test_memory_grows_linearly_with_length(schedule, monkeypatch) -> None:
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS", {})
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS_DEFAULT", 2**14)
    op = with_grads(partial(chunk_attention, how=schedule, top_k=4))
    two, four = (temporary_bytes(op, *[jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)] * 3) for T in (2048, 4096))
    assert four < 2.2 * two


@pytest.mark.slow
def test_saved_residuals_give_the_same_gradients(small_tiles) -> None:
    """Gradients match to one float32 ulp at their scale.

    XLA in jax 0.12 fuses a backward pass differently if it has no forward pass.
    """
    op, (q, k, v) = partial(chunk_attention, how="sorted", top_k=2), qkv(Shape(T=40))
    saved = jax.checkpoint(op, policy=jax.checkpoint_policies.save_only_these_names(*NAMES))
    want, got = (fast_jit(with_grads(f))(q, k, v) for f in (op, saved))
    assert got[0] == want[0]
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-23 * np.abs(b).max())


def test_refusals_name_a_supporting_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(Shape(T=20))
    decode = partial(kp.top1_chunk_decode, q[:, 0], k, v, 4)
    for call in (partial(kp.top1_chunk_attention, q, k, v), partial(kp.select_chunk, q, k), decode):
        with pytest.raises(kp.BackendError, match=r"triton: .*top_k=17; implementation='xla'"):
            call(chunk_size=8, top_k=17, implementation="triton")
        with pytest.raises(kp.BackendError, match=r"triton: .*random.*implementation='xla'"):
            call(chunk_size=8, selection="random", implementation="triton")
        with pytest.raises(ValueError, match=r"top_k .*0"):
            call(chunk_size=8, top_k=0)
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    taken = problem(chunk_size=64, selection="exact", top_k=1)
    for backend in (select_triton.BACKEND, chunk_triton.BACKEND, chunk_triton.DECODE_BACKEND):
        assert backend.refusal(taken) is None
    for selection in ("exact", "best_key", "best_key_int8", "approx"):
        several = partial(problem, chunk_size=64, selection=selection)
        for backend in (select_triton.BACKEND, chunk_triton.DECODE_BACKEND)[: 1 if selection == "best_key_int8" else 2]:
            assert backend.refusal(several(top_k=16)) is None
            assert "not top_k=17; implementation='xla'" in str(backend.refusal(several(top_k=17)))
    assert "top_k=2" in str(mosaic_gpu.refusal(problem(chunk_size=64, selection="exact", top_k=2)))
    # Attention does not select; it uses another backend's selection.
    assert chunk_triton.BACKEND.refusal(problem(chunk_size=64, selection="random", top_k=1)) is None
    assert chunk_triton.BACKEND.refusal(problem(chunk_size=64, selection="exact", top_k=4)) is None
