"""Batched continuation scores equal scores of single unpadded texts, for every mixer."""

import functools

import jax
import numpy as np
import pytest

from seqjax.evals import scoring
from seqjax.sharding import make_mesh, shardings
from tests import support

VOCAB = 48
LENGTHS = ((1, 1), (5, 3), (20, 7), (40, 1), (61, 2), (62, 3), (70, 9), (3, 70))


def requests(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [(rng.integers(0, VOCAB, n).tolist(), rng.integers(0, VOCAB, k).tolist()) for n, k in lengths]


def reference(model, params, tokens, n):
    """Return log-probability and greediness of the last `n` tokens, and the next token; float64, unpadded."""
    logits = np.asarray(LOGITS(model)(params, np.array([tokens[:-1]], np.int32))[0], np.float64)
    log_p = logits - logits.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    at = np.arange(len(tokens) - 1 - n, len(tokens) - 1)
    following = np.array(tokens)[at + 1]
    return log_p[at, following].sum(), bool((logits[at].argmax(-1) == following).all()), int(logits[-1].argmax())


@functools.cache
def LOGITS(model):  # noqa: N802
    return jax.jit(model.logits)


def scored(model, params, pairs, *, max_length=100, batch_tokens=256):
    mesh = make_mesh(devices=jax.devices()[:1])
    return scoring.score(model, params, pairs, max_length=max_length, batch_tokens=batch_tokens, mesh=mesh)


def quick(mixer, variant):
    return (mixer, variant) == ("top1_chunk", "exact")


@pytest.mark.parametrize(("mixer", "variant"), support.slow_unless(quick, support.CASES))
def test_scores_do_not_depend_on_padding(mixer, variant):
    """Lengths are no multiples of the mixer's or loss chunks, and some texts are truncated."""
    model = support.tiny_model(mixer, variant, train__seq_len=128, model__loss_chunk=40)
    params = support.random_params(model)
    is_quick = quick(mixer, variant)
    pairs, max_length = requests([(5, 3), (62, 3), (90, 9)] if is_quick else LENGTHS), 64 if is_quick else 100
    wanted = []
    for context, continuation in pairs:
        tokens = [*context, *continuation][-(max_length + 1) :]
        wanted.append(reference(model, params, tokens, len(continuation)))
    tokens = [*pairs[0][0], *pairs[0][1]]
    best = wanted[0][2]
    wrong = (best + 1) % VOCAB
    second, after_wrong = (reference(model, params, [*tokens[:-1], token, best], 1)[2] for token in (best, wrong))
    for continuation in ([best], [wrong], [best, second], [best, (second + 1) % VOCAB], [wrong, after_wrong]):
        pairs.append((tokens[:-1], continuation))
        wanted.append(reference(model, params, [*tokens[:-1], *continuation], len(continuation)))
    got = scored(model, params, pairs, max_length=max_length)
    for (log_p, is_greedy), (want, greedy, _) in zip(got, wanted, strict=True):
        assert log_p == pytest.approx(want, abs=5e-4) and is_greedy == greedy
    assert [score_.is_greedy for score_ in got[-5:]] == [True, False, True, False, False]
    assert scored(model, params, pairs, max_length=max_length) == got


@pytest.mark.slow
def test_scores_on_eight_devices_equal_one_device():
    """Meshes with data, fsdp and tensor axes, and with data and seq axes."""
    model = support.tiny_model("top1_chunk", train__seq_len=128)
    params = support.random_params(model)
    want = scored(model, params, requests())
    for sizes in ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "seq": 2}):
        mesh = make_mesh(**sizes)
        placed = jax.device_put(params, shardings(mesh, model.shapes, model.axes))
        got = scoring.score(model, placed, requests(), max_length=100, batch_tokens=256, mesh=mesh)
        for a, b in zip(got, want, strict=True):
            assert a.log_p == pytest.approx(b.log_p, abs=5e-4) and a.is_greedy == b.is_greedy


@pytest.fixture
def shapes(monkeypatch):
    """Stub the model (log-probability -1 per token) and return the list of input shapes."""
    fed = []

    def scores(params, tokens_BT, marks_BT, last_B, candidates_BC, *, model):
        fed.append(tokens_BT.shape)
        marked_B = np.asarray(marks_BT).sum(1)
        return -marked_B, marked_B, -np.ones(candidates_BC.shape), np.asarray(last_B)

    monkeypatch.setattr(scoring, "_scores", scores)
    return fed


MODEL = support.tiny_model("transformer_pp")


def test_continuations_that_differ_in_the_last_token_share_a_row(shapes):
    """Four answers to each of three questions. Equal tokens with another continuation length get another row."""
    rng = np.random.default_rng(0)
    pairs = [(context, [answer]) for context in rng.integers(0, 9, (3, 30)).tolist() for answer in range(4)]
    pairs.append((pairs[0][0][:-1], [pairs[0][0][-1], 3]))
    assert len(scoring._rows(pairs, 100)) == 4
    scores = scored(MODEL, {}, pairs, batch_tokens=10_000)
    assert [s.log_p for s in scores] == [-1.0] * 12 + [-2.0]
    assert shapes == [(4, 64)]
    many = [([1], [i]) for i in range(2 * scoring.CANDIDATES + 1)]
    assert len(scoring._rows(many, 100)) == 3


def test_two_hundred_lengths_need_five_shapes(shapes):
    """The last batch of a bucket is filled up."""
    pairs = [([1] * n, [2]) for n in range(1, 1000, 5)]
    scored(MODEL, {}, pairs, max_length=1024, batch_tokens=2048)
    assert list(dict.fromkeys(shapes)) == [(2, 1024), (4, 512), (8, 256), (16, 128), (16, 64)]


def test_long_rows_keep_their_end():
    """A continuation of `max_length` tokens is fed after the last context token."""
    context, continuation = list(range(20)), list(range(20, 30))
    for n, fed, marked in ((10, range(19, 29), 9), (12, range(17, 29), 9), (40, range(29), 9)):
        (row,) = scoring._rows([(context, continuation)], n)
        assert (row.tokens.tolist(), row.n_marked, row.requests) == (list(fed), marked, [(0, 29)])


@pytest.mark.parametrize("request_", [([], [1]), ([1], []), ([1], [1] * 11)])
def test_empty_and_too_long_requests_are_refused(request_):
    with pytest.raises(ValueError, match=r"request 0 .*max_length=10"):
        scored(MODEL, {}, [request_], max_length=10)


def test_position_table_limits_the_bucket():
    assert [scoring.bucket_of(n, longest=0) for n in (1, 64, 65, 128, 129, 3000)] == [64, 64, 128, 128, 256, 4096]
    assert [scoring.bucket_of(n, longest=100) for n in (1, 65, 100)] == [64, 100, 100]
