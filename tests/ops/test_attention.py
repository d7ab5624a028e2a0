"""Softmax attention, its decoding step and its entropy against float64 numpy."""

import itertools
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels_pallas import BackendError, backend, device, validation
from kernels_pallas.attention.api import BACKENDS, ORDER
from kernels_pallas.triton import runtime
from seqjax import mixers
from seqjax.ops import attention
from seqjax.ops.attention import attention_at, attention_entropy, attention_step, causal_attention, in_groups
from seqjax.ops.shared_attention import shared_attention
from tests import extras, support
from tests.kernels.common import fast_jit

rng = np.random.default_rng(0)


def dense_attention(q, k, v, window):
    """Compute softmax attention in float64 with an explicit mask; query heads share KV heads in groups."""
    n_heads, length = q.shape[2], q.shape[1]
    k, v = (np.repeat(np.asarray(x, np.float64), n_heads // k.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bthk,bshk->bhts", np.asarray(q, np.float64), k) / np.sqrt(q.shape[-1])
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    seen = (j <= i) & (i - j < (window or length))
    p = np.exp(s - s.max(-1, keepdims=True)) * seen
    return np.einsum("bhts,bshk->bthk", p / p.sum(-1, keepdims=True), v), seen


@pytest.mark.parametrize(
    ("n_kv", "window"),
    support.slow_unless(lambda n_kv, _: n_kv == 2, itertools.product([1, 2, 4], [0, 1, 2, 5, 13, 40])),
)
def test_attention_and_decoding_match_numpy(window, n_kv):
    """`window` includes the query's position: with W = 1 a query sees only itself."""
    q = rng.standard_normal((2, 13, 4, 8), np.float32)
    k, v = (rng.standard_normal((2, 13, n_kv, 8), np.float32) for _ in range(2))
    want, seen = dense_attention(q, k, v, window)
    assert (seen.sum(-1) == np.minimum(np.arange(13) + 1, window or 13)).all()
    got = fast_jit(partial(causal_attention, window=window))(q, k, v)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    # The last query over a cache of its visible keys, reordered, followed by garbage.
    keys = np.flatnonzero(seen[-1])[::-1]
    garbage = np.full((2, 3, n_kv, 8), 1e3, np.float32)
    cache = [jnp.asarray(np.concatenate([x[:, keys], garbage], axis=1)) for x in (k, v)]
    step = fast_jit(attention_step)(jnp.asarray(q[:, -1]), *cache, jnp.asarray(len(keys)))
    np.testing.assert_allclose(step, want[:, -1], rtol=1e-4, atol=1e-5)
    # The last queries over all keys, reordered, at positions from 100; garbage has negative positions.
    order = rng.permutation(13)
    cache = [jnp.asarray(np.concatenate([x[:, order], garbage], axis=1)) for x in (k, v)]
    positions_S = jnp.asarray([*(100 + order), -1, -2, -300])
    at = fast_jit(partial(attention_at, window=window))
    piece = at(jnp.asarray(q[:, 4:]), *cache, 100 + jnp.arange(4, 13), positions_S)
    np.testing.assert_allclose(piece, want[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", [None, "xla", "chunked"])
@pytest.mark.parametrize("value_dim", [5, 12])
def test_values_may_be_narrower_or_wider_than_keys(value_dim, implementation):
    """The scale depends on the keys' width; gradients have the shapes of the operands."""
    q, k = rng.standard_normal((2, 13, 4, 8), np.float32), rng.standard_normal((2, 13, 2, 8), np.float32)
    v, do = (jnp.asarray(rng.standard_normal((2, 13, n, value_dim), np.float32)) for n in (2, 4))
    want, seen = dense_attention(q, k, v, 0)

    @fast_jit
    def outputs(q, k, v):
        o, pull = jax.vjp(partial(causal_attention, implementation=implementation), q, k, v)
        positions = jnp.arange(13)
        others = attention_at(q, k, v, positions, positions), attention_step(q[:, -1], k, v, jnp.asarray(13))
        return o, pull(do), others

    o, grads, (at, step) = outputs(q, k, v)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    np.testing.assert_allclose(o, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(at, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(step, want[:, -1], rtol=1e-4, atol=1e-5)
    s = np.einsum("bthk,bshk->bhts", q, np.repeat(k, 2, axis=2)) / np.sqrt(8)
    p = np.exp(s - s.max(-1, keepdims=True)) * seen
    dv = np.einsum("bhts,bthk->bshk", p / p.sum(-1, keepdims=True), do)
    np.testing.assert_allclose(grads[2], dv.reshape(2, 13, 2, 2, value_dim).sum(3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "slopes"), [(0, ()), (5, ()), (0, (0.5, 0.25, 2.0, 1.0)), (5, (0.5, 0.25, 2.0, 1.0))]
)
def test_alibi_scale_and_entropy_match_numpy(window, slopes):
    """Blocks of 4 keys do not divide the 13 positions."""
    q, k, v = (rng.standard_normal((2, 13, n, 8), np.float32) for n in (4, 2, 2))
    i, j = np.arange(13)[:, None], np.arange(13)[None]
    k64, v64 = (np.repeat(np.asarray(x, np.float64), 2, axis=2) for x in (k, v))
    s = 1.5 * np.einsum("bthk,bshk->bhts", q, k64) - np.asarray(slopes or (0.0,) * 4)[:, None, None] * (i - j)
    p = np.exp(s - s.max(-1, keepdims=True)) * ((j <= i) & (i - j < (window or 13)))
    p /= p.sum(-1, keepdims=True)
    want = np.einsum("bhts,bshk->bthk", p, v64)
    positions, options = jnp.arange(13), {"scale": 1.5, "slopes": slopes}

    @fast_jit
    def outputs(q, k, v):
        return (
            causal_attention(q, k, v, window=window, **options),
            attention_at(q, k, v, positions, positions, window=window, **options),
            None if window else attention_step(q[:, -1], k, v, jnp.asarray(13), **options),
            attention_entropy(q, k, window=window, block=4, **options),
        )

    got, piece, step, entropy = outputs(q, k, v)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(piece, want, rtol=1e-4, atol=1e-5)
    if step is not None:
        np.testing.assert_allclose(step, want[:, -1], rtol=1e-4, atol=1e-5)
    dense = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
    np.testing.assert_allclose(entropy, np.moveaxis(dense, 1, 2), atol=1e-5)


@pytest.mark.parametrize("n_queries", [3, 4, 7, 8, 13])
def test_grouped_queries_equal_all_queries(monkeypatch, n_queries):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 13, 2, 8), np.float32)) for _ in range(3))
    positions = jnp.arange(13)

    def attend(q_BtHK, positions_t):
        return attention_at(q_BtHK, k, v, positions_t, positions)

    queries = q[:, :n_queries], positions[:n_queries]
    want = fast_jit(attend)(*queries)
    monkeypatch.setattr(attention, "GROUP", 4)
    np.testing.assert_allclose(fast_jit(partial(in_groups, attend))(*queries), want, atol=1e-6)


@pytest.mark.parametrize("mixer", ["transformer_pp", "top1_chunk", "top1_element", "fox"])
def test_chunked_prefill_holds_one_group_of_scores(mixer):
    """[4096, 12288] float32 scores of all queries are 192 MiB per head; the chunk uses less than half."""
    layer = mixers.load(mixer)(8, heads=1, rngs=nnx.Rngs(0))
    x_BTD = jax.ShapeDtypeStruct((1, 4096, 8), jnp.float32)
    cache = jax.eval_shape(lambda: layer.init_cache(1, 12288, jnp.float32))
    compiled = jax.jit(layer.prefill_next).lower(x_BTD, cache).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 12288 * 4 / 2


def test_gates_must_fit_the_queries():
    with pytest.raises(ValueError, match=r"log_f.*\(2, 5, 4, 8\).*\(2, 5, 2\)"):
        validation.check_per_head("log_f", (2, 5, 2), (2, 5, 4, 8))


def test_attention_takes_a_scale():
    q, k, v = (jnp.asarray(rng.standard_normal((1, 6, 2, 4), np.float32)) for _ in range(3))
    np.testing.assert_allclose(
        causal_attention(q, k, v, scale=1.5), causal_attention(3 * q, k, v, scale=0.5), atol=1e-5
    )
    step = attention_step(q[:, -1], k, v, jnp.asarray(6), scale=1.5)
    np.testing.assert_allclose(step, causal_attention(q, k, v, scale=1.5)[:, -1], atol=1e-5)


def test_scores_of_bfloat16_inputs_are_float32():
    """The scores are 256 and 257; bfloat16 would round both to 256, and the weights 0.27 and 0.73 would be equal."""
    q_BTHK, k_BTHK, v_BTHK = (
        jnp.asarray(rows, jnp.bfloat16)[None, :, None] for rows in ([[16, 1]] * 2, [[16, 0], [16, 1]], [[0, 0], [1, 1]])
    )
    positions, p = jnp.arange(2), np.e / (1 + np.e)

    @fast_jit
    def outputs(q_BTHK, k_BTHK, v_BTHK):
        return (
            causal_attention(q_BTHK, k_BTHK, v_BTHK, scale=1.0)[:, -1],
            attention_step(q_BTHK[:, -1], k_BTHK, v_BTHK, jnp.asarray(2), scale=1.0),
            attention_at(q_BTHK, k_BTHK, v_BTHK, positions, positions, scale=1.0)[:, -1],
            shared_attention(q_BTHK[0], k_BTHK[0], v_BTHK, scale=1.0)[:, -1],
        ), attention_entropy(q_BTHK, k_BTHK, scale=1.0)

    outs, entropy_BTH = outputs(q_BTHK, k_BTHK, v_BTHK)
    for o_BHK in outs:
        np.testing.assert_allclose(np.asarray(o_BHK, np.float64), p, rtol=2**-8)
    np.testing.assert_allclose(entropy_BTH[0, 1, 0], -p * np.log(p) - (1 - p) * np.log(1 - p), atol=1e-4)


@pytest.fixture
def chosen_backend(monkeypatch):
    """Return a function that names the backend of a problem on a platform, without running it."""
    monkeypatch.setattr(backend, "_used", {})
    monkeypatch.setattr(backend, "_logged", set())

    def choose(
        platform,
        capability=None,
        *,
        n_tokens=512,
        dtype=jnp.bfloat16,
        head_dim=64,
        slopes=(),
        named=None,
        gates=False,
        segments=False,
    ):
        monkeypatch.setattr(device, "platform", lambda: platform)
        monkeypatch.setattr(device, "compute_capability", lambda: capability)
        x = jax.ShapeDtypeStruct((1, n_tokens, 2, head_dim), dtype)
        options = {"window": 0, "slopes": slopes, "has_gates": gates} | ({"has_segments": True} if segments else {})
        backend.pick("causal_attention", BACKENDS, named, (x, x, x), options, order=ORDER)
        return backend.used()["causal_attention"]

    return choose


@pytest.mark.parametrize(
    ("problem", "want"),
    [
        ({"capability": 80}, "cudnn"),  # A100
        ({"capability": 90, "dtype": jnp.float16}, "cudnn"),
        ({"capability": 90, "dtype": jnp.float32}, "chunked"),
        ({"capability": 75}, "chunked"),  # T4
        ({"capability": 75, "n_tokens": 256}, "xla"),
        ({"capability": None}, "chunked"),  # AMD
        ({"capability": 90, "head_dim": 60}, "chunked"),
        ({"capability": 80, "head_dim": 192}, "chunked"),
        ({"capability": 90, "head_dim": 192}, "cudnn"),
        ({"capability": 90, "slopes": (0.5, 0.25)}, "chunked"),
        ({"platform": "tpu"}, "splash"),
        ({"platform": "tpu", "n_tokens": 102_400, "dtype": jnp.float32}, "splash"),
        ({"platform": "tpu", "dtype": jnp.float16}, "chunked"),
        ({"platform": "tpu", "slopes": (0.5, 0.25)}, "chunked"),
        ({"capability": 90, "gates": True}, "chunked"),  # with TRITON_INTERPRET set, as here
        ({"platform": "tpu", "gates": True}, "chunked"),
        ({"capability": 90, "segments": True}, "chunked"),  # with TRITON_INTERPRET set, as here
        ({"platform": "tpu", "segments": True}, "splash"),
        ({"platform": "cpu", "n_tokens": 256}, "xla"),
        ({"platform": "cpu", "n_tokens": 257}, "chunked"),
        ({"platform": "cpu", "n_tokens": 100_000, "named": "xla"}, "xla"),
        ({"platform": "cpu", "n_tokens": 8, "named": "chunked"}, "chunked"),
    ],
)
def test_backend_choice_by_device_and_problem(chosen_backend, caplog, problem, want):
    """Problems that cuDNN and splash attention refuse run elsewhere; the log names the backend."""
    with caplog.at_level(logging.INFO, logger="kernels_pallas"):
        assert chosen_backend(**{"platform": "gpu"} | problem) == want
    assert [record.getMessage() for record in caplog.records] == [f"causal_attention runs on {want}"]


def test_segments_use_triton_where_available(chosen_backend, monkeypatch):
    extras.need("triton")
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert chosen_backend("gpu", 90, segments=True) == chosen_backend("gpu", 80, segments=True, gates=True) == "triton"
    assert chosen_backend("gpu", 90, segments=True, slopes=(0.5, 0.25)) == "triton"
    assert chosen_backend("gpu", 90, segments=True, head_dim=192) == "chunked"


def test_gates_use_triton_where_available(chosen_backend, monkeypatch):
    extras.need("triton")
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert chosen_backend("gpu", 90, gates=True) == chosen_backend("gpu", 90, gates=True, dtype=jnp.float32) == "triton"
    assert (
        chosen_backend("gpu", 90, gates=True, slopes=(0.5, 0.25))
        == chosen_backend("gpu", 90, gates=True, head_dim=192)
        == "chunked"
    )


@pytest.mark.parametrize(
    ("named", "problem", "reason"),
    [
        ("cudnn", {"platform": "cpu"}, "cuDNN.*NVIDIA GPU.*cpu"),
        ("cudnn", {"platform": "gpu", "capability": 75}, r"cudnn: .*7\.5"),
        ("cudnn", {"platform": "gpu", "capability": 90, "slopes": (1.0, 0.5)}, "ALiBi"),
        ("triton", {"platform": "gpu", "capability": 75, "gates": True}, r"8\.0"),
        ("splash", {"platform": "gpu", "capability": 90}, "splash: .*TPU.*gpu"),
        ("splash", {"platform": "tpu", "slopes": (1.0, 0.5)}, "splash: .*ALiBi"),
        ("cudnn", {"platform": "gpu", "capability": 90, "gates": True}, "forget gates"),
        ("splash", {"platform": "tpu", "gates": True}, "splash: .*forget gates"),
        ("flash", {"platform": "cpu"}, "'flash'.*cudnn, triton, splash, xla, chunked"),
    ],
)
def test_a_named_implementation_that_cannot_run_is_refused(chosen_backend, named, problem, reason):
    with pytest.raises(BackendError, match=reason):
        chosen_backend(**problem, named=named)


def test_implementations_agree():
    """The default is bitwise xla at 256 tokens and bitwise chunked at 257."""
    inputs = [jnp.asarray(rng.standard_normal((1, 257, 2, 8)), jnp.float32) for _ in range(3)]
    shorter = [x[:, :256] for x in inputs]
    run = {
        name: fast_jit(partial(causal_attention, window=70, implementation=name)) for name in (None, "xla", "chunked")
    }
    long = {name: run[name](*inputs) for name in run}
    np.testing.assert_allclose(long["xla"], long["chunked"], atol=1e-5)
    np.testing.assert_array_equal(long[None], long["chunked"])
    assert not (long["xla"] == long["chunked"]).all()
    np.testing.assert_array_equal(run[None](*shorter), run["xla"](*shorter))
