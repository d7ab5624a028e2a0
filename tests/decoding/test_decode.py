"""Prefill in pieces, compiled programs, and timing."""

import collections
import itertools

import jax
import numpy as np
import pytest

from seqjax.decoding import Phase, Sampling, Timing, decode, tokens
from seqjax.decoding.decode import _pieces
from seqjax.errors import UserError
from tests import support

TRACE, COMPILE = "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def events():
    """Return JAX's counts of traces and compilations."""
    counts = collections.Counter()

    def listen(event, seconds, **labels):
        counts[event] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def new():
    model = support.tiny_model("transformer_pp", "window")
    params, text = support.random_params(model), np.asarray(support.random_tokens((2, 200)))

    def run(n_prompt, n_new=6, **options):
        options = {"sampling": Sampling(temperature=0.0), "prefill_chunk": 64} | options
        new_tokens = tokens(params, text[:, :n_prompt], jax.random.key(0), model=model, n_new=n_new, **options)
        return np.stack(list(new_tokens), axis=1)

    return run


def test_pieces_have_few_sizes():
    assert _pieces(5, 512) == [1] * 5
    assert _pieces(70, 512) == [32, 32, *[1] * 6]
    assert _pieces(1090, 512) == [512, 512, 32, 32, 1, 1]
    assert _pieces(7, 3) == [3, 3, 1]
    assert _pieces(1090, 0) == [1090]
    for n in range(1, 300):
        assert sum(_pieces(n, 128)) == n
    with pytest.raises(UserError, match=r"prefill_chunk=-1"):
        _pieces(3, -1)
    with pytest.raises(UserError, match=r"prompt .*bos"):
        _pieces(0, 3)


def test_prefill_chunk_does_not_change_the_tokens(new):
    want = new(101, prefill_chunk=0)
    assert len(np.unique(want)) > 3
    np.testing.assert_array_equal(new(101), want)  # 64, 32 and 5 steps
    np.testing.assert_array_equal(new(101, prefill_chunk=7), want)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.6}, {0, 1, 3}),
        ({"top_p": 0.6, "top_k": 2}, {1, 3}),
        ({"temperature": 0.0}, {1}),
    ],
)
def test_sampling_settings_select_the_tokens(settings, want):
    """At a high temperature, where four tokens are about equally likely."""
    sampling = Sampling(**{"temperature": 50.0} | settings)
    logits = np.tile(np.array([2.0, 4.0, 1.0, 3.0], np.float32), (200, 1))
    new_tokens, is_finite = decode._sample(logits, jax.random.key(0), np.int32(0), sampling=sampling)
    assert is_finite and set(np.asarray(new_tokens).tolist()) == want


def test_prompts_with_two_lengths_share_a_batch(new):
    """Rows equal single prompts; the rest of a longer prompt is yielded while it is fed."""
    longer, shorter = new(101), new(70, 37)
    both = new(101, lengths_B=[101, 70])
    np.testing.assert_array_equal(both[0, 31:], longer[0])
    np.testing.assert_array_equal(both[1], shorter[1])
    np.testing.assert_array_equal(both[0, :31], np.asarray(support.random_tokens((2, 200)))[0, 70:101])


def test_cache_growth_does_not_change_the_tokens(new, monkeypatch):
    want = new(101, 60)
    monkeypatch.setattr(decode, "SMALLEST_CACHE", 8)  # a cache of 128, then of 256
    np.testing.assert_array_equal(new(101, 60), want)
    both = new(101, 40, lengths_B=[101, 70])
    np.testing.assert_array_equal(both[0, 31:], want[0, :40])


def test_cache_length_does_not_depend_on_requested_tokens(monkeypatch):
    model, lengths = support.tiny_model("transformer_pp", "window"), []
    init_cache = type(model).init_cache
    monkeypatch.setattr(
        type(model), "init_cache", lambda self, *args: lengths.append(args[1]) or init_cache(self, *args)
    )
    options = {"model": model, "n_new": 100_000, "sampling": Sampling(temperature=0.0)}
    new_tokens = tokens(support.random_params(model), np.zeros((1, 3), np.int32), jax.random.key(0), **options)
    assert len(list(itertools.islice(new_tokens, 510))) == 510
    assert lengths == [512, 1024]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_an_error(bad, temperature):
    """Without the error, argmax would return token 0."""
    model = support.tiny_model("transformer_pp", "window")
    params = support.random_params(model)
    params["norm"]["g"] = params["norm"]["g"].at[3].set(bad)
    new_tokens = tokens(
        params, np.ones((2, 5)), jax.random.key(0), model=model, n_new=3, sampling=Sampling(temperature=temperature)
    )
    with pytest.raises(UserError, match=r"logits .* 5 tokens .*NaN"):
        next(new_tokens)


def test_other_lengths_compile_nothing(new, events):
    new(163)  # two pieces of 64, one of 32, steps
    before = events.copy()
    for n_prompt, n_new in ((1, 90), (5, 3), (33, 20), (70, 6), (200, 50)):
        assert new(n_prompt, n_new).shape == (2, n_new)
    assert events - before == {}
    new(3, 300)  # a longer cache
    assert events[TRACE] > before[TRACE]
    assert events[COMPILE] > before[COMPILE]  # the counter works


def test_timing_excludes_compilation(new):
    first, second = Timing(), Timing()
    sampling = Sampling(temperature=0.7, top_k=3)
    new(5, 4, sampling=sampling, timing=first)
    new(5, 4, sampling=sampling, timing=second)
    assert first.compile_seconds > 0
    assert second.compile_seconds == 0
    for timing in (first, second):
        assert (timing.prefill.tokens, timing.decode.tokens) == (2 * 5, 2 * 4)
        assert timing.prefill.seconds > 0
        assert timing.decode.seconds > 0
    text = str(Timing(Phase(1000, 0.5), Phase(10, 2.0), compile_seconds=3.0))
    assert text == "prefill 1,000 tokens, 2,000 tokens/s; decode 10 tokens, 5 tokens/s (without compiling, 3.0 s)"
    assert "compiling" not in str(second)
