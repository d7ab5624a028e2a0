"""Triton attention with forget gates: values and gradients against float64.

The tests also cover gate sums, causality and FoX.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.attention import reference
from tests import extras, support
from tests.kernels.common import ON_GPU, fast_jit
from tests.kernels.test_chunked_attention import TOLERANCE, by_hand, log_gates, operands, output_and_gradients

gated = extras.triton_module("attention.triton.gated")


def attend(*operands, **options):
    return gated.attend(*operands, **options)


OPTIONS = {"window": 0, "scale": 0.7, "slopes": ()}
run = fast_jit(partial(output_and_gradients, attend=attend, **OPTIONS))
forward = fast_jit(lambda *x: gated.attend(*x, **OPTIONS))  # a third of the time in the interpreter


@pytest.mark.parametrize(
    ("n_tokens", "n_kv", "dtype"),
    support.slow_unless(
        lambda n_tokens, n_kv, dtype: (n_tokens, dtype) in ((37, "bfloat16"), (1, "float32")),
        [(50, 4, "float32"), (37, 2, "bfloat16"), (1, 4, "float32"), (65, 1, "float32"), (64, 2, "float16")],
    ),
)
def test_values_and_gradients(n_tokens, n_kv, dtype):
    inputs: Any = (*operands(n_tokens, n_kv, dtype), log_gates(n_tokens))
    got = run(*inputs)
    for x, like, want in zip(got, (inputs[3], *inputs[:3], inputs[4]), by_hand(*inputs, **OPTIONS), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        scale = max(1.0, np.abs(want).max())
        np.testing.assert_allclose(x.astype(jnp.float32), want, atol=TOLERANCE[dtype] * scale, rtol=0)


@pytest.mark.parametrize(
    ("low", "high"), support.slow_unless(lambda low, high: low < 0 < high, [(-100, -90), (90, 100), (-100, 100)])
)
def test_gates_near_zero_and_one(low, high):
    """Closed gates leave a query only its own value, without overflow.

    Later tokens change no output bits.
    """
    inputs: Any = (*operands(50), log_gates(50, low, high))
    got = run(*inputs)
    for x, want in zip(got, by_hand(*inputs, **OPTIONS), strict=True):
        # Sums from a tile's first key reach 3,200, where adjacent float32 numbers are 2.4e-4 apart.
        np.testing.assert_allclose(x, want, atol=4e-4 * max(1.0, np.abs(want).max()), rtol=0)
    if high < 0:
        np.testing.assert_allclose(got[0], inputs[2], atol=1e-6)
    q, k, v, _, log_f = inputs
    changed = forward(q, k.at[:, 17].add(1.0), v, log_f.at[:, 17].add(-1.0))
    np.testing.assert_array_equal(changed[:, :17], got[0][:, :17])


def test_near_keys_stay_accurate_after_a_long_past():
    """The gate sum reaches 16,000, where adjacent float32 numbers are 1e-3 apart."""
    log_f = jnp.where(jnp.arange(160)[:, None] < 144, -111.0, -0.01 * jnp.arange(1, 5))[None]
    q, k, v, do = operands(160, n_batch=1)
    want = by_hand(q, k, v, do, log_f, **OPTIONS)[0]
    np.testing.assert_allclose(forward(q, k, v, log_f)[:, 144:], want[:, 144:], atol=4e-6)


def test_gate_sums_match_float64():
    log_f = jax.nn.log_sigmoid(4 * jax.random.normal(jax.random.key(0), (1, 20_000, 2)))
    whole, rest = (np.asarray(x, np.float64) for x in jax.jit(gated.running_sums)(log_f))
    want = np.cumsum(np.asarray(log_f, np.float64), axis=1).transpose(0, 2, 1)
    assert np.abs(rest).max() <= 0.5 and (whole == np.round(whole)).all() and want.min() < -20_000
    np.testing.assert_allclose(whole + rest, want, atol=4e-6, rtol=0)  # 30 roundings of at most 3e-8, some shared
    np.testing.assert_allclose(np.diff(whole) + np.diff(rest), np.diff(want), atol=3e-7, rtol=0)


@pytest.mark.slow
def test_bfloat16_gate_gradients_do_not_accumulate_rounding():
    rng = np.random.default_rng(0)
    q, k, v, do = (jnp.asarray(rng.standard_normal((1, 256, 1, 16)), jnp.bfloat16) for _ in range(4))
    log_f = jnp.full((1, 256, 1), np.log(0.5), jnp.float32)
    got = run(q, k, v, do, log_f)[-1]
    wide = (x.astype(jnp.float32) for x in (q, k, v, do))
    want = fast_jit(partial(output_and_gradients, attend=reference.causal_attention, **OPTIONS))(*wide, log_f)[-1]
    assert jnp.sqrt(jnp.mean((got - want) ** 2)) < 0.01 * jnp.sqrt(jnp.mean(want**2))


@pytest.mark.slow
def test_batches_under_vmap():
    """All mapped elements use one launch."""
    inputs: Any = (*operands(20, n_batch=4), jnp.concatenate([log_gates(20)] * 2))
    want = run(*inputs)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in inputs]
    mapped = jax.vmap(partial(output_and_gradients, attend=attend, **OPTIONS))
    for x, y in zip(fast_jit(mapped)(*split), want, strict=True):
        np.testing.assert_array_equal(x.reshape(y.shape), y)


@extras.mark("torch", "triton")
def test_fox_mixer_with_kernels_equals_xla():
    tokens = support.random_tokens((2, 41))
    models = [
        support.tiny_model("fox", model__n_layers=1, model__mixer__implementation=name)
        for name in ("chunked", "triton")
    ]
    weights = support.random_params(models[0])
    losses = [jax.jit(jax.value_and_grad(lambda p, model=model: model.loss(p, tokens)[0]))(weights) for model in models]
    for x, y in zip(jax.tree.leaves(losses[1]), jax.tree.leaves(losses[0]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1.0, float(jnp.abs(y).max())), rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("T", "dim", "n_kv"), [(1024, 64, 4), (127, 64, 2), (1000, 96, 4), (513, 128, 1), (2048, 64, 4)]
)
def test_at_real_sizes(T, dim, n_kv, dtype):
    rng = np.random.default_rng(0)
    q, do = (jnp.asarray(rng.standard_normal((2, T, 4, dim)), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((2, T, n_kv, dim)), dtype) for _ in range(2))
    options = {"window": 0, "scale": dim**-0.5, "slopes": ()}
    got = jax.jit(partial(output_and_gradients, attend=gated.attend, **options))(q, k, v, do, log_gates(T))
    with jax.enable_x64(True):  # a float32 sum of -3,000 is off by 1e-4
        wide = (jnp.asarray(x, jnp.float64) for x in (q, k, v, do, log_gates(T)))
        want = jax.jit(partial(output_and_gradients, attend=reference.causal_attention, **options))(*wide)
    for x, y in zip(got, want, strict=True):
        scale = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=TOLERANCE[dtype] * scale, rtol=0)


@pytest.mark.skipif(ON_GPU, reason="a CPU is wanted: what refuses there")
def test_refusals_name_another_backend():
    q, k, v, _ = operands(20)
    with pytest.raises(kp.BackendError, match=r"forget gates.*cuDNN"):
        kp.causal_attention(q, k, v, implementation="triton")
    with pytest.raises(kp.BackendError, match="implementation='chunked' does"):
        kp.causal_attention(q, k, v, log_gates(20), window=5, implementation="triton")
