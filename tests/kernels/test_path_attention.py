"""PaTH attention: both backends against a float64 oracle, token by token.

Vmap, causality, refusals.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.path_attention import reference, xla
from kernels_pallas.path_walk import triton as walk
from tests import extras, support
from tests.kernels.common import fast_jit

attention = extras.triton_module("path_attention.triton.attention")

TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03}
NAMES = ("q", "k", "v", "w", "beta", "log_f")


def operands(
    seq_len=29, *, heads=2, kv_heads=1, key=16, value=16, dtype="float32", gates=True, batch=1, alike=False, seed=0
) -> Any:
    """Draw the operands and a cotangent; token 1 has beta 0, token 2 has beta 2.

    With `alike` all w are similar and beta is near 2, where the inverses are largest.
    """
    rng = np.random.default_rng(seed)

    def normal(n, dim):
        return rng.standard_normal((batch, seq_len, n, dim))

    w = normal(kv_heads, key) * (0.2 if alike else 1) + alike
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    beta = rng.uniform(1.9 if alike else 0, 2, size=(batch, seq_len, kv_heads))
    beta[:, 1:2], beta[:, 2:3] = 0, 2
    log_f = np.log(rng.uniform(0.3, 1, size=(batch, seq_len, heads))) if gates else None
    data = (jnp.asarray(x, dtype) for x in (normal(heads, key), normal(kv_heads, key), normal(kv_heads, value)))
    inputs = (*data, *(None if x is None else jnp.float32(x) for x in (w, beta, log_f)))
    return inputs, jnp.asarray(normal(heads, value), dtype)


def output_and_gradients(inputs, do, *, run):
    present = [x for x in inputs if x is not None]
    o, pull = jax.vjp(lambda *arrays: run(*arrays, *[None] * (len(inputs) - len(arrays))), *present)
    return o, *pull(do)


BACKENDS = {"xla": xla.run, "triton": lambda *operands, **options: attention.run(*operands, **options)}
QUICK: tuple[dict, ...] = ({}, {"seq_len": 20, "key": 24, "dtype": "bfloat16", "heads": 1, "gates": False})
CASES = support.slow_unless(
    lambda name, options: options in QUICK,
    [
        (name, options)
        for name in BACKENDS
        for options in (
            *QUICK,
            {"seq_len": 9},
            {"seq_len": 33, "alike": True, "value": 32},
            {"seq_len": 40, "heads": 2, "kv_heads": 2, "batch": 2, "gates": False},
            {"seq_len": 70, "chunk_size": 64, "key": 32},
            {"seq_len": 64, "chunk_size": 32, "alike": True, "dtype": "bfloat16"},
        )
    ],
)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_and_gradients(name, options):
    options = dict(options)
    chunk_size = options.pop("chunk_size", 16)
    inputs, do = operands(**options)
    run = partial(BACKENDS[name], chunk_size=min(chunk_size, inputs[0].shape[1]))
    got = fast_jit(partial(output_and_gradients, run=run))(inputs, do)
    near(got, inputs, do, TOLERANCE[options.get("dtype", "float32")])


def near(got, inputs, do, tolerance):
    """Compare the output and gradients with the oracle.

    They have the shapes and dtypes of the inputs.
    """
    with jax.enable_x64(True):
        wide = tuple(None if x is None else jnp.asarray(x, jnp.float64) for x in inputs)
        want = jax.jit(partial(output_and_gradients, run=reference.path_attention))(wide, jnp.asarray(do, jnp.float64))
    like = (do, *(x for x in inputs if x is not None))
    names = ("o", *(name for name, x in zip(NAMES, inputs, strict=True) if x is not None))
    for name, x, y, z in zip(names, got, want, like, strict=True):
        assert (x.shape, x.dtype) == (z.shape, z.dtype), name
        scale = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=tolerance * scale, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", BACKENDS)
def test_causal_to_the_last_bit(name):
    (q, k, v, w, beta, log_f), _ = operands(33)
    run = fast_jit(partial(BACKENDS[name], chunk_size=16))
    before = run(q, k, v, w, beta, log_f)
    changed = run(q, *(x.at[:, 20].add(0.5) for x in (k, v, w, beta, log_f)))
    np.testing.assert_array_equal(changed[:, :20], before[:, :20])
    assert not np.array_equal(changed[:, 20:], before[:, 20:])


@extras.mark("torch", "triton")
def test_operand_scales_do_not_change_the_precision():
    """The kernels use fp16 with powers of two for most products, also of large queries and small gradients."""
    (q, k, *rest), do = operands(24, dtype="bfloat16", gates=False, alike=True)
    call = fast_jit(partial(output_and_gradients, run=partial(BACKENDS["triton"], chunk_size=16)))
    got = call((q * 2.0**20, k * 2.0**-20, *rest), do * 2.0**-40)
    want = call((q, k, *rest), do)
    for x, y, exponent in zip(got, want, (0, 60, 20, 40, 40, 40), strict=True):
        scaled = np.asarray(x.astype(jnp.float32)) * 2.0**exponent
        np.testing.assert_array_equal(scaled, y.astype(jnp.float32), err_msg=str(exponent))


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_batches_under_vmap(name):
    inputs, do = operands(batch=4)
    call = partial(output_and_gradients, run=partial(BACKENDS[name], chunk_size=16))
    want = fast_jit(call)(inputs, do)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in (*inputs, do)]
    mapped = jax.vmap(lambda *x: call(x[:-1], x[-1]))
    for x, y in zip(fast_jit(mapped)(*split), want, strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, atol=1e-6)


@extras.mark("torch", "triton")
def test_refusals(monkeypatch):
    (q, k, v, *path), _ = operands(key=65)
    with pytest.raises(kp.BackendError, match=r"head dim 65 .*64"):
        kp.path_attention(q, k, v, *path, implementation="triton")
    (q, k, v, *path), _ = operands()
    with pytest.raises(kp.BackendError, match="one dtype"):
        kp.path_attention(q.astype(jnp.bfloat16), k, v, *path, implementation="triton")
    monkeypatch.setattr(walk, "MOST_GIB", 0.0)
    with pytest.raises(kp.BackendError, match=r"backward pass .*2 chunks of 16"):
        kp.path_attention(q, k, v, *path, chunk_size=16, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "options",
    [{"seq_len": 2048, "key": 64, "value": 64}, {"seq_len": 1000, "key": 48, "value": 64, "kv_heads": 2, "batch": 2},
     {"seq_len": 333, "key": 32, "value": 64, "gates": False, "alike": True}],
)  # fmt: skip
def test_at_real_sizes(options, dtype):
    inputs, do = operands(**options, dtype=dtype)
    got = jax.jit(partial(output_and_gradients, run=partial(attention.run, chunk_size=128)))(inputs, do)
    near(got, inputs, do, {"float32": 2e-4, "bfloat16": 0.03, "float16": 0.01}[dtype])
