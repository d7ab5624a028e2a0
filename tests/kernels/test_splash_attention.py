"""Splash attention without a TPU: interpreted values, TPU export, masks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from kernels_pallas.attention import reference
from kernels_pallas.attention.splash import kernel
from seqjax.sharding import heads_split, make_mesh


def output_and_gradients(attend, q, k, v):
    o, pull = jax.vjp(attend, q, k, v)
    return o, *pull(jnp.cos(o))


def operands(n_batch, n_tokens, n_heads, n_kv):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((n_batch, n_tokens, n, 64)), jnp.float32) for n in (n_heads, n_kv, n_kv)]


def assert_equals_dense(program, inputs, options):
    want = jax.jit(partial(output_and_gradients, partial(reference.causal_attention, **options)))(*inputs)
    for x, y in zip(program(*inputs), want, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 50, 128, 300])
def test_values_and_gradients_in_the_interpreter(window, monkeypatch):
    """200 tokens need two blocks of 128, the second partial; queries are grouped."""
    monkeypatch.setattr(kernel, "BLOCK", 128)
    options = {"window": window, "scale": 0.2, "slopes": ()}
    attend = partial(kernel.attend, interpret=True, **options)
    assert_equals_dense(jax.jit(partial(output_and_gradients, attend)), operands(2, 200, 4, 2), options)


@pytest.mark.slow
def test_mesh_devices_split_sequences_and_heads():
    options = {"window": 0, "scale": 0.2, "slopes": ()}
    inputs = operands(4, 128, 4, 2)
    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        attend = partial(kernel.attend, interpret=True, split=heads_split(4, 2), **options)
        program = jax.jit(partial(output_and_gradients, attend))
        assert_equals_dense(program, inputs, options)
        text = program.lower(*inputs).compile().as_text()
    assert "f32[1,2,128,64]" in text, "one sequence and two of four heads"


@pytest.mark.parametrize(("window", "n_devices"), [(0, 1), (256, 8)])
def test_attention_lowers_for_a_tpu(window, n_devices):
    lower_for_a_tpu(2_048, window, n_devices)


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 256])
def test_102400_tokens_lower_for_a_tpu(window):
    lower_for_a_tpu(102_400, window, 1)
    hits = kernel._kernel.cache_info().hits
    lower_for_a_tpu(102_400, window, 1)
    assert kernel._kernel.cache_info().hits == hits + 1, "the mask is not built twice"


def lower_for_a_tpu(n_tokens, window, n_devices):
    """Lower to one forward and two backward kernels.

    No other array is as large as the scores.
    """
    x = jax.ShapeDtypeStruct((8, n_tokens, 12, 64), jnp.bfloat16)
    with jax.set_mesh(make_mesh(data=n_devices, devices=jax.devices()[:n_devices])):
        attend = partial(kernel.attend, window=window, scale=0.125, slopes=(), split=heads_split(8, 12))
        program = export.export(jax.jit(partial(output_and_gradients, attend)), platforms=["tpu"])(x, x, x)
    assert program.mlir_module().count("stablehlo.custom_call @tpu_custom_call") == 3
    assert [y.shape for y in program.out_avals] == [x.shape] * 4


@pytest.mark.parametrize("window", [None, 1, 128, 200, 256, 1_000])
def test_the_lazy_mask_matches_the_dense_mask(window):
    shape, left = (768, 768), None if window is None else window - 1
    cheap = kernel._CheapMask(shape, (left, 0), offset=0)
    whole = splash.LocalMask(shape, (left, 0), offset=0)
    for row in range(0, 768, 128):
        for col in range(0, 768, 128):
            block = slice(row, row + 128), slice(col, col + 128)
            np.testing.assert_array_equal(np.broadcast_to(cheap[block], (128, 128)), whole[block])
