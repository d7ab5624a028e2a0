"""Top-1 Chunk over packed documents: selection, attention and gradients.

The tests also change one document and compare the bits of the other documents.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.select_chunk import documents, tables
from kernels_pallas.select_chunk import reference as select_reference
from kernels_pallas.top1_chunk import reference
from kernels_pallas.top1_chunk.xla import attention as xla_attention
from tests import extras, support
from tests.kernels.common import HOW, ON_GPU, SCHEDULES, Shape, assert_close, fast_jit, qkv, value_and_grads
from tests.kernels.test_documents import packed

# First tokens of documents with chunks of 8: within chunks, at an edge, several in a chunk, one that spans chunks.
CUTS = ((3, 16, 18, 21, 22), (35,))
SHAPE = Shape(T=53, C=8)
RULES = [
    {"selection": "exact"},
    {"selection": "best_key", "top_k": 2},
    {"selection": "best_key_int8"},
    {"selection": "approx", "top_k": 3},
    {"selection": "shortlist", "shortlist": 2, "table": "mean"},
    {"selection": "shortlist", "shortlist": 3, "table": "sub_means", "top_k": 2},
    {"selection": "shortlist", "shortlist": 2, "table": "mean_eigen"},
    {"selection": "random", "top_k": 2},
]


IN_TRITON = ("exact", "best_key", "approx")


def rule_name(rule: dict) -> str:
    return "-".join(map(str, rule.values()))


def by_definition(q, k, segments, C: int, selection: str) -> np.ndarray:
    """Return the selection of every query, by loops in float64."""
    q, k, segments = (np.asarray(x, np.float64) for x in (q, k, segments))
    B, T, H, K = q.shape
    chosen = np.full((B, T, H), -1)
    for b, t, h in np.ndindex(B, T, H):
        best = -np.inf
        for c in range(t // C):
            at = np.arange(c * C, c * C + C)
            if segments[b, at[-1]] != segments[b, t]:
                continue
            keys = k[b, at[segments[b, at] == segments[b, t]], h // (H // k.shape[2])]
            s = keys @ q[b, t, h] / np.sqrt(K)
            score = {"exact": np.log(np.exp(s).sum()), "best_key": s.max(), "approx": s.mean()}[selection]
            if score > best:
                best, chosen[b, t, h] = score, c
    return chosen


@pytest.mark.parametrize("selection", ["exact", "best_key", "approx"])
def test_the_reference_matches_loops(selection):
    q, k, _ = qkv(SHAPE)
    segments = packed(SHAPE.T, CUTS)
    select = partial(select_reference.select_chunk, chunk_size=8, selection=selection)
    got = fast_jit(lambda q, k: select(q, k, segments_BT=segments))(q, k)
    np.testing.assert_array_equal(got, by_definition(q, k, segments, 8, selection))


@pytest.mark.parametrize(
    ("rule", "how"),
    support.slow_unless(
        lambda rule, how: how == "xla" and (rule["selection"] == "exact" or rule.get("table") == "sub_means"),
        [*[(rule, "xla") for rule in RULES], *[(rule, "triton") for rule in RULES if rule["selection"] in IN_TRITON]],
    ),
    ids=lambda x: x if isinstance(x, str) else rule_name(x),
)
def test_selection_matches_the_reference(rule, how, small_tiles):
    q, k, _ = qkv(SHAPE)
    segments = packed(SHAPE.T, CUTS)
    got = fast_jit(lambda q, k: kp.select_chunk(q, k, segments=segments, chunk_size=8, implementation=how, **rule))
    want = fast_jit(lambda q, k: select_reference.select_chunk(q, k, chunk_size=8, segments_BT=segments, **rule))
    np.testing.assert_array_equal(got(q, k), want(q, k))


@pytest.mark.parametrize(
    ("how", "top_k", "dtype", "shared"),
    support.slow_unless(
        lambda how, top_k, dtype, shared: dtype == "float32" and top_k == 1,
        [
            *[(how, top_k, dtype, False) for how in HOW for top_k in (1, 3) for dtype in ("float32", "bfloat16")],
            *[(how, 3, "float32", True) for how in HOW],
        ],
    ),
)
def test_attention_and_gradients_match_the_reference(how, top_k, dtype, shared, small_tiles):
    """`shared`: the query heads of a key-value head share a selection."""
    q, k, v = qkv(SHAPE, dtype=dtype)
    segments = packed(SHAPE.T, CUTS)
    options: Any = {"chunk_size": 8, "scale": 0.4}
    sel = select_reference.select_chunk(q, k, top_k=top_k, segments_BT=segments, **options)
    each = sel
    if shared:
        sel = sel[:, :, :: SHAPE.R]
        each = jnp.repeat(sel, SHAPE.R, axis=2)
    assert (np.asarray(sel) >= 0).mean() > 0.2
    schedule = SCHEDULES[how] if how in SCHEDULES else extras.triton_module("top1_chunk.triton.attention")

    def attend(q, k, v):
        return schedule.forward(q, k, v, sel, segments_BT=segments, **options)

    (o, lse), wide = fast_jit(attend)(q, k, v), [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    want, want_grads = value_and_grads(
        lambda q, k, v: reference.attend(q, k, v, each, segments_BT=segments, **options), *wide
    )
    do = jnp.asarray(np.random.default_rng(1).normal(size=o.shape), o.dtype)
    backward = fast_jit(lambda *x: schedule.backward(*x, chunk_size=8, scale=0.4, segments_BT=segments))
    assert_close(o, want, dtype)
    for x, y, like in zip(backward(q, k, v, o, lse, sel, do), want_grads, (q, k, v), strict=True):
        assert x.dtype == like.dtype
        assert_close(x, y, dtype)


@pytest.mark.parametrize(
    ("rule", "how"),
    support.slow_unless(
        lambda rule, how: (
            (rule_name(rule), how) == ("approx-3", "sorted") or (rule_name(rule), how) == ("exact", "xla")
        ),
        [
            *[(rule, how) for rule in RULES for how in ("xla", "sorted")],
            *[(rule, "triton") for rule in RULES if rule["selection"] in ("exact", "approx")],
        ],
    ),
    ids=str,
)
def test_a_document_depends_on_no_other_document(rule, how, small_tiles, monkeypatch):
    """Changing document 1 changes no bit of documents 2 and 3.

    A loss on document 2 has no gradient in other documents, and its gradients keep their bits too.
    """
    if how == "sorted":
        monkeypatch.setattr(xla_attention, "MASKED_UP_TO", 0)
        monkeypatch.setattr(xla_attention, "is_short", lambda *_: False)
    shape, cuts = Shape(T=61, C=8), (19, 43)
    q, k, v = qkv(shape)
    do = jnp.asarray(np.random.default_rng(1).normal(size=(shape.B, shape.T, shape.heads, shape.V)), jnp.float32)
    segments = packed(shape.T, (cuts, cuts))

    @fast_jit
    def run(q, k, v, do):
        options = {"chunk_size": 8, "implementation": "triton" if how == "triton" else "xla"}
        f = partial(kp.top1_chunk_attention, segments=segments, **options, **rule)
        o, pull = jax.vjp(f, q, k, v)
        return o, *pull(do)

    t = np.arange(shape.T)
    inside = (t >= cuts[0]) & (t < cuts[1])
    changed = [x.at[:, : cuts[0]].multiply(-1.7) for x in (q, k, v, do)]
    got = run(q, k, v, do)
    for x, y in zip(got, run(*changed), strict=True):
        np.testing.assert_array_equal(x[:, cuts[0] :], y[:, cuts[0] :])
        assert not (x[:, : cuts[0]] == y[:, : cuts[0]]).all()
    only = jnp.where(inside[:, None, None], do, 0)
    for x, y, every in zip(run(q, k, v, only)[1:], run(*changed[:3], only)[1:], got[1:], strict=True):
        assert not x[:, ~inside].any()
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x[:, inside], every[:, inside])


@pytest.mark.parametrize(
    "rule",
    support.slow_unless(lambda rule: rule.get("table") == "mean_eigen", [(rule,) for rule in RULES[:-1]]),
    ids=rule_name,
)
def test_documents_of_whole_chunks_equal_separate_sequences(rule):
    """The random rule is an exception: it depends on the positions in the packed sequence."""
    q, k, v = qkv(Shape(T=53, B=1))
    attend = partial(kp.top1_chunk_attention, chunk_size=8, implementation="xla", **rule)
    segments = packed(53, ((24,),))
    o, grads = value_and_grads(partial(attend, segments=segments), q, k, v)
    do = jnp.asarray(np.random.default_rng(1).normal(size=o.shape), o.dtype)

    @fast_jit
    def alone(q, k, v, do):
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(do)

    for at in (slice(0, 24), slice(24, None)):
        for x, y in zip((o, *grads), alone(*(x[:, at] for x in (q, k, v, do))), strict=True):
            assert_close(x[:, at], y, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["xla", "triton"])
def test_batches_under_vmap(how):
    q, k, v = qkv(Shape(T=29, B=4))
    segments = packed(29, CUTS * 2)

    def run(segments, q, k, v):
        f = partial(kp.top1_chunk_attention, segments=segments, chunk_size=8, implementation=how)
        o, pull = jax.vjp(f, q, k, v)
        return o, *pull(o)

    split = [x.reshape(2, 2, *x.shape[1:]) for x in (segments, q, k, v)]
    for x, y in zip(fast_jit(jax.vmap(run))(*split), fast_jit(run)(segments, q, k, v), strict=True):
        assert_close(x.reshape(y.shape), y, "float32")


def test_chunks_of_other_documents_count_as_none():
    q, k, v = qkv(SHAPE)
    segments = packed(SHAPE.T, CUTS)
    first = np.asarray(documents.starts(segments)) // 8
    own = np.arange(SHAPE.T) // 8
    sel = np.full((2, SHAPE.T, SHAPE.heads, 2), -1, np.int32)
    sel[..., 0] = np.where(own > 0, 0, -1)[:, None]  # the first chunk, of whatever document
    sel[..., 1] = np.where(own > 1, own - 1, -1)[:, None]
    valid = np.where(sel >= first[..., None, None], sel, -1)
    assert (sel != valid).any() and (valid >= 0).any()
    got, want = (
        kp.selected_chunk_attention(q, k, v, jnp.asarray(x), chunk_size=8, segments=segments) for x in (sel, valid)
    )
    np.testing.assert_array_equal(got, want)
    assert_close(got, reference.attend(q, k, v, jnp.asarray(valid), chunk_size=8, segments_BT=segments), "float32")


@pytest.mark.parametrize("table", tables.N_ROWS)
def test_tables_cover_the_readable_keys(table):
    """A chunk of readable keys has the usual rows; otherwise the first keys have no effect."""
    k = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 5)), jnp.float32)
    everything = tables.rows(k, table, jnp.ones((3, 16), bool))
    np.testing.assert_allclose(everything, tables.rows(k, table), atol=1e-6)
    readable = jnp.arange(16) >= jnp.asarray([[0], [6], [15]])
    got = tables.rows(k, table, readable)
    np.testing.assert_array_equal(got, tables.rows(jnp.where(readable[..., None], k, 99.0), table, readable))
    np.testing.assert_allclose(
        got[1, -1 if table == "sub_means" else 0], k[1, 14 if table == "sub_means" else 6 :].mean(0), atol=1e-6
    )
    if table == "mean_eigen":
        np.testing.assert_allclose(np.abs(got[1, 1]), np.abs(tables.rows(k[1, 6:], table)[1]), atol=1e-5)
        assert not got[2, 1].any()


@pytest.mark.skipif(ON_GPU, reason="a CPU is wanted: what refuses there")
def test_kernels_without_segments_refuse_them():
    q, k, _ = qkv(SHAPE)
    for name, rule, why in (("triton", "shortlist", "with segments it has exact"), ("pallas", "exact", "no segments")):
        with pytest.raises(kp.BackendError, match=why):
            kp.select_chunk(q, k, segments=packed(SHAPE.T, CUTS), chunk_size=8, selection=rule, implementation=name)
