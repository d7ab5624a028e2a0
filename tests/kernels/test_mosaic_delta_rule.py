"""The delta rule's passes over time in Pallas Mosaic GPU: values, CUDA lowering, refusals.

Values are interpreted. The interpreter does not model asynchronous `wgmma`, so only a GPU reveals reads that come too
early. The whole backend needs a GPU: the other launches are Triton kernels (test_delta_rule.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import backend, device, mosaic_gpu
from kernels_pallas.delta_rule import mosaic_gpu as backend_of_mosaic
from kernels_pallas.delta_rule import reference
from kernels_pallas.triton import runtime
from tests import support

kernel = pytest.importorskip("kernels_pallas.delta_rule.mosaic_gpu.kernel", reason="this jax has no Pallas Mosaic GPU")

reverse = pytest.importorskip("kernels_pallas.delta_rule.mosaic_gpu.reverse")
gradients = pytest.importorskip("kernels_pallas.delta_rule.mosaic_gpu.gradients")

refusal = mosaic_gpu.refusal("cpu")
interpreted = pytest.mark.skipif(
    refusal is not None or jax.default_backend() != "cpu", reason=refusal or "the interpreter runs on a CPU"
)
C = 64


def draw(T: int, K: int, V: int, *, decay: float | None, dtype: str = "bfloat16", H: int = 1):
    """Draw q, k, v, beta, log_g and state; keys are unit vectors."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, T, H, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, state = rng.normal(size=(1, T, H, V)), rng.normal(size=(1, H, K, V))
    beta = np.clip(rng.normal(1, 1, size=(1, T, H)), 0, 2)
    log_g = None if decay is None else jnp.asarray(-decay * np.exp(0.5 * rng.normal(size=(1, T, H))), jnp.float32)
    wide = jnp.asarray(beta, jnp.float32), log_g, jnp.asarray(state, jnp.float32)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), *wide


def chunked(x_BTH):
    """Return [B, c, H, C], zero-padded."""
    x = jnp.pad(x_BTH, ((0, 0), (0, -x_BTH.shape[1] % C), (0, 0)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, C, x.shape[2]), 2, 3)


def within_chunks(q, k, beta, log_g):
    """Return X * G and M [B, T, H, C] in the dtype of q, and g, from their definitions."""
    (B, T, H, _), dtype = q.shape, q.dtype
    g = jnp.cumsum(chunked(log_g), axis=-1)
    rows = [jnp.stack([chunked(x[..., i]) for i in range(x.shape[-1])], -1).astype(jnp.float32) for x in (q, k)]
    gap = g[..., :, None] - g[..., None, :]
    G = jnp.exp(jnp.where(jnp.tril(jnp.ones((C, C), bool)), gap, -jnp.inf))
    product = partial(jnp.einsum, "bchtk,bchsk->bchts", precision="highest")
    A = jnp.tril(chunked(beta)[..., None] * product(rows[1], rows[1]), -1)
    x = (jnp.linalg.inv(jnp.eye(C) + A) * G).astype(dtype)
    m = ((product(*rows) * G).astype(dtype).astype(jnp.float32) @ x.astype(jnp.float32)).astype(dtype)
    joined = [jnp.moveaxis(a, 2, 3).reshape(B, -1, H, C)[:, :T] for a in (x, m)]
    return *joined, g


def recurrence(q, k, v, beta, log_g, state):
    q, k, v = q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32)
    return reference.delta_rule(q, k, v, beta, log_g, state)


def relative(got, want) -> float:
    """Return the largest difference over the largest entry."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.abs(got - want).max() / np.abs(want).max()


CASES = [
    ((70, 64, 64), 0.1, "bfloat16"),
    ((130, 128, 128), 0.1, "bfloat16"),
    ((128, 96, 192), 0.1, "float16"),
    ((100, 64, 64), 30.0, "bfloat16"),
    ((70, 96, 64), None, "bfloat16"),
]


@interpreted
@pytest.mark.parametrize(("shape", "decay", "dtype"), support.slow_unless(lambda *case: case == CASES[0], CASES))
def test_equals_the_recurrence(shape, decay, dtype) -> None:
    """Also the states at the chunk starts and W, from which the backward pass starts."""
    q, k, v, beta, log_g, state = draw(*shape, decay=decay, dtype=dtype)
    x, m, g = within_chunks(q, k, beta, jnp.zeros_like(beta) if log_g is None else log_g)
    run = partial(kernel.pass_over_time, keep=True, interpret=True)
    o, last, states, w = jax.jit(run)(q, k, v, x, m, chunked(beta), None if log_g is None else g, state)
    want_o, want_last = recurrence(q, k, v, beta, log_g, state)
    assert (o.dtype, last.dtype, states.dtype, w.shape) == (q.dtype, jnp.float32, q.dtype, v.shape)
    unit = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(o, want_o, rtol=0, atol=4 * unit * np.abs(want_o).max())
    np.testing.assert_allclose(last, want_last, rtol=0, atol=4 * unit * np.abs(want_last).max())
    np.testing.assert_array_equal(states[:, 0], state.astype(dtype))
    start = states[:, -1].astype(jnp.float32)
    at = (states.shape[1] - 1) * C
    late_g = None if log_g is None else log_g[:, at:]
    again, _ = recurrence(q[:, at:], k[:, at:], v[:, at:], beta[:, at:], late_g, start)
    np.testing.assert_allclose(o[:, at:], again, rtol=0, atol=8 * unit * np.abs(want_o).max())


@interpreted
def test_without_keep_it_gives_the_same_outputs() -> None:
    q, k, v, beta, log_g, state = draw(64, 64, 64, decay=0.1)
    x, m, g = within_chunks(q, k, beta, log_g)
    run = [jax.jit(partial(kernel.pass_over_time, keep=keep, interpret=True)) for keep in (True, False)]
    kept, bare = (f(q, k, v, x, m, chunked(beta), g, state) for f in run)
    assert (len(kept), len(bare)) == (4, 2)
    jax.tree.map(np.testing.assert_array_equal, kept[:2], bare)


@interpreted
@pytest.mark.parametrize(
    ("shape", "decay", "dtype"),
    support.slow_unless(
        lambda *case: case == CASES[0], [*CASES, ((130, 96, 192), 30.0, "bfloat16"), ((300, 64, 64), 0.1, "bfloat16")]
    ),
)
def test_reverse_equals_the_gradients_of_the_recurrence(shape, decay, dtype) -> None:
    """dv is beta dY, and L of a chunk is the gradient of the state after it, which `late` starts from."""
    q, k, v, beta, log_g, state = draw(*shape, decay=decay, dtype=dtype)
    do, d_last = v[:, ::-1], -state
    x, m, g = within_chunks(q, k, beta, jnp.zeros_like(beta) if log_g is None else log_g)
    run = jax.jit(partial(reverse.pass_back_over_time, interpret=True))
    d_states, dy, d_initial = run(q, k, x, m, chunked(beta), None if log_g is None else g, do, d_last)
    assert (d_states.dtype, dy.dtype, d_initial.dtype) == (q.dtype, q.dtype, jnp.float32)

    def pull(start: int) -> tuple:
        keys, wide = (q[:, start:], k[:, start:]), v[:, start:].astype(jnp.float32)
        gates = beta[:, start:], None if log_g is None else log_g[:, start:]
        _, vjp = jax.vjp(lambda v, state: recurrence(*keys, v, *gates, state), wide, state)
        return vjp((do[:, start:].astype(jnp.float32), d_last))

    (dv, want), (_, late) = pull(0), pull(C)
    unit = float(jnp.finfo(dtype).eps) / 2
    assert relative(beta[..., None] * dy, dv) <= 4 * unit
    assert relative(d_initial, want) <= 4 * unit
    assert relative(d_states[:, 0], late) <= 4 * unit
    np.testing.assert_array_equal(d_states[:, -1], d_last.astype(dtype))


@pytest.mark.skipif(jax.__version_info__ < backend_of_mosaic.JAX, reason="this jax is too old")
@pytest.mark.parametrize(("K", "V"), [(128, 128), (96, 192), (64, 64)])
@pytest.mark.parametrize("keep", [True, False])
def test_lowers_for_cuda(K, V, keep) -> None:
    """Mosaic compiles the kernel to a GPU module; it raises here if it cannot."""
    B, T, H = 2, 1001, 3
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    row = jax.ShapeDtypeStruct((B, -(-T // C), H, C), jnp.float32)
    keys, values, pairs = shape((B, T, H, K)), shape((B, T, H, V)), shape((B, T, H, C))
    state = jax.ShapeDtypeStruct((B, H, K, V), jnp.float32)
    run = jax.jit(partial(kernel.pass_over_time, keep=keep))
    text = run.trace(keys, keys, values, pairs, pairs, row, row, state).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.skipif(jax.__version_info__ < backend_of_mosaic.JAX, reason="this jax is too old")
@pytest.mark.parametrize(("K", "V"), [(128, 128), (96, 192), (64, 64)])
def test_reverse_lowers_for_cuda(K, V) -> None:
    B, T, H = 2, 1001, 3
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    row = jax.ShapeDtypeStruct((B, -(-T // C), H, C), jnp.float32)
    keys, values, pairs = shape((B, T, H, K)), shape((B, T, H, V)), shape((B, T, H, C))
    state = jax.ShapeDtypeStruct((B, H, K, V), jnp.float32)
    traced = jax.jit(reverse.pass_back_over_time).trace(keys, keys, pairs, pairs, row, row, values, state)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.skipif(jax.__version_info__ < backend_of_mosaic.JAX, reason="this jax is too old")
def test_layers_share_kernels() -> None:
    """Otherwise twelve layers compile for minutes."""
    B, T, H, K, V = 1, 128, 1, 64, 64
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    row, state = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, T // C, H, C), (B, H, K, V)))
    x, states = shape((B, T, H, C)), shape((B, T // C, H, K, V))

    def layers(x, row, state, states):
        for _ in range(3):
            o, *_ = kernel.pass_over_time(x, x, x, x, x, row, row, state, keep=True)
            _, dy, _ = reverse.pass_back_over_time(o, x, x, x, row, row, x, state)
            _, x, *_ = gradients.gradients(o, x, x, x, row, row, states, x, dy, states)
        return x

    text = jax.jit(layers).trace(x, row, state, states).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize(("K", "V"), [(128, 128), (96, 192), (64, 64), (128, 256)])
@pytest.mark.parametrize(("keep", "back"), [(True, False), (False, False), (True, True)])
def test_shared_memory_fits(K, V, keep, back) -> None:
    n = kernel.Sizes(1, 1, K, V, C, 1, jnp.dtype("bfloat16"), keep, False, back)
    assert n.stages in (2, 3)
    sizes = [int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in kernel.scratch(n)[:-2]]
    assert sum(sizes) + 1024 <= kernel.SHARED


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "float32"}, "q is float32"),
        ({"K": 32}, "key dim 32"),
        ({"V": 96}, "value dim 96"),
        ({"chunk": 32}, "shorter than 64"),
        ({"platform": "cpu"}, "on a GPU only"),
        ({"jax": (9, 9)}, "it needs 9.9"),
        ({"capability": 80}, "needs Hopper's"),
        ({}, None),
    ],
    ids=str,
)
def test_refusals_name_the_reason(change, match, monkeypatch) -> None:
    n = {"dtype": "bfloat16", "K": 96, "V": 192, "chunk": 64, "platform": "gpu", "capability": 90}
    n = n | {"jax": (0, 1)} | change
    monkeypatch.setattr(device, "compute_capability", lambda: n["capability"])
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    monkeypatch.setattr(backend_of_mosaic, "JAX", n["jax"])
    k, v = ((1, 512, 2, n["K"]), n["dtype"]), ((1, 512, 2, n["V"]), n["dtype"])
    row, state = ((1, 512, 2), "float32"), ((1, 2, n["K"], n["V"]), "float32")
    operands = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in (k, k, v, row, state, row))
    problem = backend.Problem(n["platform"], operands, {"chunk_size": n["chunk"]}, is_named=True)
    reason = backend_of_mosaic.refusal(problem)
    assert reason is None if match is None else match in str(reason)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "decay", "dtype"), [((T, *dims), d, t) for (T, *dims), d, t in CASES])
def test_forward_and_gradients_match_triton(shape, decay, dtype) -> None:
    arrays = draw(*shape, decay=decay, dtype=dtype, H=2)

    def run(implementation: str):
        f = partial(kp.delta_rule, chunk_size=C, implementation=implementation)
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.square(f(*a)[0].astype(jnp.float32))), (0, 1, 2, 3)))

    got, want = run("pallas")(*arrays), run("triton")(*arrays)
    unit = float(jnp.finfo(dtype).eps) / 2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.abs(a - b).max() <= 4 * unit * np.abs(b).max()
