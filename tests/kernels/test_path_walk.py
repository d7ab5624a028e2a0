"""PaTH's walk over past chunks: both backends against a float64 oracle.

Vmap, causality, refusals.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.path_walk import reference, triton, xla
from tests import extras, support
from tests.kernels.common import fast_jit

walk = extras.triton_module("path_walk.triton.walk")

TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03}
NAMES = ("q", "k", "v", "product", "forgotten", "own", "lse")


def operands(chunks=3, chunk=16, *, key=16, value=16, dtype="float32", gates=True, batch=2, heads=2, seed=0) -> Any:
    """Draw the arguments of `run` and a cotangent.

    Matrices I - P roughly preserve query lengths.
    """
    rng = np.random.default_rng(seed)
    shape = chunks, batch, heads, chunk

    def normal(*dims):
        return jnp.asarray(rng.standard_normal((*shape, *dims)), jnp.float32)

    w = rng.standard_normal((*shape[:3], 4, key))
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    product = jnp.asarray(rng.uniform(0, 1, (*shape[:3], 1, 1)) * np.swapaxes(w, -1, -2) @ w, jnp.float32)
    forgotten = -jnp.cumsum(jnp.abs(normal()), -1) / 8 if gates else None
    data = (normal(key) / 4, normal(key).astype(dtype), normal(value).astype(dtype), product, forgotten)
    return (*data, normal(value), normal()), normal(value)


def output_and_gradients(inputs, do, *, run):
    operands_present = [x for x in inputs if x is not None]

    def call(*arrays):
        left = list(arrays)
        return run(*(None if x is None else left.pop(0) for x in inputs))

    o, pull = jax.vjp(call, *operands_present)
    return o, *pull(do)


BACKENDS = {"xla": xla.run, "triton": lambda *operands, **options: walk.run(*operands, **options)}
CASES = support.slow_unless(
    lambda name, options: name == "xla" or options in ({}, {"chunks": 2, "key": 24, "value": 16, "dtype": "bfloat16"}),
    [
        (name, options)
        for name in BACKENDS
        for options in (
            {},
            {"chunks": 2, "key": 24, "value": 16, "dtype": "bfloat16"},
            {"chunks": 5, "gates": False, "key": 16, "value": 32},
            {"chunks": 4, "chunk": 128, "batch": 1, "heads": 1, "key": 16},
        )
    ],
)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_and_gradients(name, options):
    inputs, do = operands(**options)
    got = fast_jit(partial(output_and_gradients, run=BACKENDS[name]))(inputs, do)
    near(got, inputs, do, TOLERANCE[options.get("dtype", "float32")])


def near(got, inputs, do, tolerance):
    """Compare the output and gradients with the oracle.

    They have the shapes and dtypes of the inputs.
    """
    with jax.enable_x64(True):
        wide = tuple(None if x is None else jnp.asarray(x, jnp.float64) for x in inputs)
        want = jax.jit(partial(output_and_gradients, run=reference.path_walk))(wide, jnp.asarray(do, jnp.float64))
    like = (inputs[5], *(x for x in inputs if x is not None))
    names = ("o", *(name for name, x in zip(NAMES, inputs, strict=True) if x is not None))
    for name, x, y, z in zip(names, got, want, like, strict=True):
        assert (x.shape, x.dtype) == (z.shape, z.dtype), name
        scale = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=tolerance * scale, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", BACKENDS)
def test_causal_to_the_last_bit(name):
    (q, k, v, product, forgotten, own, lse), _ = operands(chunks=4)
    run = fast_jit(BACKENDS[name])
    before = run(q, k, v, product, forgotten, own, lse)
    later = (x.at[2].add(1.0) for x in (k, v, product))
    changed = run(q, *later, forgotten, own, lse)
    np.testing.assert_array_equal(changed[:3], before[:3])
    assert not np.array_equal(changed[3], before[3])


@extras.mark("torch", "triton")
def test_operand_scales_change_no_bit_of_the_kernels():
    """Products with P use fp16 and a power of two per row: large queries and small gradients keep their precision."""
    (q, k, *rest), do = operands(chunks=3, dtype="bfloat16", gates=False)
    call = fast_jit(partial(output_and_gradients, run=BACKENDS["triton"]))
    o, dq, dk, *others = call((q, k, *rest), do)
    got_o, got_dq, got_dk, *got_others = call((q * 2.0**20, k * 2.0**-20, *rest), do * 2.0**-40)
    np.testing.assert_array_equal(got_o, o)
    np.testing.assert_array_equal(got_dq * 2.0**60, dq)
    np.testing.assert_array_equal(got_dk * 2.0**20, dk)
    for x, y in zip(got_others, others, strict=True):
        np.testing.assert_array_equal(x * 2.0**40, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_batches_under_vmap(name):
    inputs, do = operands(batch=4)
    call = partial(output_and_gradients, run=BACKENDS[name])
    want = fast_jit(call)(inputs, do)
    split = [x.reshape(x.shape[0], 2, 2, *x.shape[2:]) for x in (*inputs, do)]
    mapped = jax.vmap(lambda *x: call(x[:-1], x[-1]), in_axes=1, out_axes=1)
    for x, y in zip(fast_jit(mapped)(*split), want, strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, atol=1e-6)


@extras.mark("torch", "triton")
def test_path_mixer_with_kernels_equals_xla():
    tokens = support.random_tokens((2, 41))
    options = {"model__mixer__chunk_size": 16, "model__mixer__forget_gate": True, "model__n_layers": 1}
    models = [support.tiny_model("path", model__mixer__implementation=name, **options) for name in ("xla", "triton")]
    weights = support.random_params(models[0])
    losses = [jax.jit(jax.value_and_grad(lambda p, model=model: model.loss(p, tokens)[0]))(weights) for model in models]
    for x, y in zip(jax.tree.leaves(losses[1]), jax.tree.leaves(losses[0]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1.0, float(jnp.abs(y).max())), rtol=0)


def test_one_chunk_returns_local_attention():
    (*inputs, own, lse), _ = operands(chunks=1)
    assert kp.path_walk(*inputs, own=(own, lse)) is own


@extras.mark("torch", "triton")
def test_refusals(monkeypatch):
    (q, k, v, product, forgotten, *own), _ = operands(chunk=24)

    def walked():
        return kp.path_walk(q, k, v, product, forgotten, own=tuple(own), implementation="triton")

    with pytest.raises(kp.BackendError, match=r"chunks of 24 .*16"):
        walked()
    (q, k, v, product, forgotten, *own), _ = operands(key=65)
    with pytest.raises(kp.BackendError, match=r"head dim 65 .*64"):
        walked()
    (q, k, v, product, forgotten, *own), _ = operands()
    monkeypatch.setattr(triton, "MOST_GIB", 0.0)
    with pytest.raises(kp.BackendError, match="3 chunks of 16"):
        walked()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "options",
    [{"chunks": 16, "chunk": 128, "key": 64, "value": 64}, {"chunks": 9, "chunk": 64, "key": 48, "value": 64},
     {"chunks": 5, "chunk": 32, "key": 32, "value": 64, "gates": False}],
)  # fmt: skip
def test_at_real_sizes(options, dtype):
    inputs, do = operands(**options, dtype=dtype)
    got = jax.jit(partial(output_and_gradients, run=walk.run))(inputs, do)
    near(got, inputs, do, {"float32": 2e-4, "bfloat16": 0.03, "float16": 0.01}[dtype])
