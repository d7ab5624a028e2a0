"""The delta rule's input gradients in Pallas Mosaic GPU: values, CUDA lowering, shared memory.

Values are interpreted (test_mosaic_delta_rule.py says what the interpreter leaves to a GPU). The reference is the same
operation in float64, from the same rounded operands: what is left are the kernel's own roundings.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import mosaic_gpu
from kernels_pallas.delta_rule import mosaic_gpu as backend_of_mosaic
from kernels_pallas.delta_rule import reference
from tests import support

kernel = pytest.importorskip("kernels_pallas.delta_rule.mosaic_gpu.kernel", reason="this jax has no Pallas Mosaic GPU")
gradients = pytest.importorskip("kernels_pallas.delta_rule.mosaic_gpu.gradients")

refusal = mosaic_gpu.refusal("cpu")
interpreted = pytest.mark.skipif(
    refusal is not None or jax.default_backend() != "cpu", reason=refusal or "the interpreter runs on a CPU"
)
C = 64
NAMES = ("dq", "dk", "dv", "dbeta", "dg")


def chunks_of(x_BTHD):
    """Return [B, c, H, C, D] in float64, zero-padded."""
    x = np.asarray(x_BTHD, np.float64)
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % C), (0, 0), (0, 0)))
    return x.reshape(x.shape[0], -1, C, *x.shape[2:]).swapaxes(2, 3)


def rows_of(x_BcHCD, T):
    """Undo `chunks_of`."""
    x = x_BcHCD.swapaxes(2, 3)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]


def decays(g):
    return np.exp(np.where(np.tril(np.ones((C, C), bool)), g[..., :, None] - g[..., None, :], -np.inf))


def draw(T: int, K: int, V: int, *, decay: float | None, dtype: str, H: int = 1, similar: float = 0.0):
    """Return the kernel's operands, from a forward and a reverse pass in float64, and the log decays' own operands.

    `similar` adds one vector to all keys.
    """
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, T, H, K)) for _ in range(2))
    k = k + similar * rng.normal(size=(1, 1, H, K))
    q, k = (np.asarray(jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), dtype), np.float64) for x in (q, k))
    v, do = (np.asarray(jnp.asarray(rng.normal(size=(1, T, H, V)), dtype), np.float64) for _ in range(2))
    beta = np.clip(rng.normal(1, 1, size=(1, T, H)), 0, 2).astype(np.float32)
    log_g = -(decay or 0.0) * np.exp(0.5 * rng.normal(size=(1, T, H))).astype(np.float32)
    start, dlast = rng.normal(size=(2, 1, H, K, V))

    qc, kc, vc, doc = map(chunks_of, (q, k, v, do))
    beta_c, log_g_c = (chunks_of(x[..., None])[..., 0] for x in (beta, log_g))
    g = np.cumsum(log_g_c, -1)
    G, grow, late = decays(g)[:], np.exp(g)[..., None], np.exp(g[..., -1:] - g)[..., None]
    A = np.tril(beta_c[..., None] * (kc @ kc.swapaxes(-1, -2)), -1)
    X = np.linalg.inv(np.eye(C) + A) * G
    P = (qc @ kc.swapaxes(-1, -2)) * G
    S, states, w = start, [], []
    for c in range(qc.shape[1]):
        states.append(S)
        w.append(X[:, c] @ (beta_c[:, c, :, :, None] * (vc[:, c] - grow[:, c] * (kc[:, c] @ S))))
        S = grow[:, c, :, -1:] * S + kc[:, c].swapaxes(-1, -2) @ (late[:, c] * w[c])
    L, dstates, dy = dlast, [], []
    for c in reversed(range(qc.shape[1])):
        dstates.insert(0, L)
        dw = P[:, c].swapaxes(-1, -2) @ doc[:, c] + late[:, c] * (kc[:, c] @ L)
        dy.insert(0, X[:, c].swapaxes(-1, -2) @ dw)
        dseen = grow[:, c] * beta_c[:, c, :, :, None] * dy[0]
        L = grow[:, c, :, -1:] * L + qc[:, c].swapaxes(-1, -2) @ (grow[:, c] * doc[:, c])
        L = L - kc[:, c].swapaxes(-1, -2) @ dseen
    w, dy = (rows_of(np.stack(x, 1), T) for x in (w, dy))
    low = (jnp.asarray(x, dtype) for x in (q, k, v, w, np.stack(states, 1), do, dy, np.stack(dstates, 1)))
    q_, k_, v_, w_, states_, do_, dy_, dstates_ = low
    wide = jnp.asarray(beta_c, jnp.float32), None if decay is None else jnp.asarray(g, jnp.float32)
    operands = q_, k_, v_, w_, *wide, states_, do_, dy_, dstates_
    return operands, (q, k, v, beta, log_g, start, do, dlast)


def exact(q, k, v, w, beta, g, states, do, dy, dstates, *, low=lambda x: x):
    """Compute the equations of api.py in float64.

    With `low`, as triton/bwd_kernels.py: `low` rounds the products of pairs before they multiply, and row parts.
    """
    T = q.shape[1]
    q, k, v, w, do, dy = map(chunks_of, (q, k, v, w, do, dy))
    states, dstates, beta = (np.asarray(x, np.float64) for x in (states, dstates, beta))
    has_gate, g = g is not None, np.zeros_like(beta) if g is None else np.asarray(g, np.float64)
    t = partial(np.swapaxes, axis1=-1, axis2=-2)
    G, grow, late = decays(g), np.exp(g)[..., None], np.exp(g[..., -1:] - g)[..., None]
    z, m = (do @ t(w)) * G, np.tril(-(dy @ t(w)) * G, -1)
    beta_m = low(beta[..., None] * m)
    dq = low(z) @ k + grow * (do @ t(states))
    seen = grow * (dy @ t(states))
    rows = beta_m @ k - beta[..., None] * seen
    written = late * (w @ t(dstates))
    columns = t(low(z)) @ q + t(beta_m) @ k + written
    dbeta = np.sum(dy * v, -1) - np.sum(k * seen, -1) + np.sum(m * (k @ t(k)), -1)
    dg = np.sum(q * dq + k * rows - k * columns, -1)
    dg[..., -1] += np.exp(g[..., -1]) * np.sum(states * dstates, (-1, -2)) + np.sum(k * written, (-1, -2))
    out = rows_of(dq, T), rows_of(low(rows) + columns, T), rows_of(beta[..., None] * dy, T), dbeta
    return (*out, dg) if has_gate else out


def log_decay_gradients(dg):
    return np.flip(np.cumsum(np.flip(np.asarray(dg, np.float64), -1), -1), -1)


CASES = [
    ((150, 64, 64), 0.1, "bfloat16"),
    ((130, 128, 128), 0.1, "bfloat16"),
    ((192, 96, 192), 1e-3, "float16"),
    ((100, 64, 128), 30.0, "bfloat16"),
    ((70, 96, 192), None, "bfloat16"),
]


@interpreted
@pytest.mark.parametrize(("shape", "decay", "dtype"), support.slow_unless(lambda *case: case == CASES[0], CASES))
def test_equals_float64(shape, decay, dtype) -> None:
    """Two programs take all chunks of two heads, so the rings and all barriers turn over."""
    operands, _ = draw(*shape, decay=decay, dtype=dtype, H=2)
    got = jax.jit(partial(gradients.gradients, programs=2, interpret=True))(*operands)
    want = exact(*operands)
    assert len(got) == len(want) == 4 + (decay is not None)
    unit = float(jnp.finfo(dtype).eps) / 2
    for name, a, b in zip(NAMES, got, want, strict=False):
        assert a.dtype == (jnp.float32 if name in ("dbeta", "dg") else dtype)
        few = 1e-5 if name in ("dbeta", "dg") else 4 * unit
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=few * np.abs(b).max(), err_msg=name)


@pytest.mark.slow
@interpreted
def test_equals_the_gradients_of_the_recurrence() -> None:
    T = 100
    operands, (q, k, v, beta, log_g, start, do, dlast) = draw(T, 64, 64, decay=0.1, dtype="bfloat16")
    *got, dbeta, dg = jax.jit(partial(gradients.gradients, interpret=True))(*operands)
    got += [rows_of(np.asarray(x)[..., None], T)[..., 0] for x in (dbeta, log_decay_gradients(dg))]
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, k, v, beta, log_g, start))
    _, pull = jax.vjp(reference.delta_rule, *arrays)
    want = pull((jnp.asarray(do, jnp.float32), jnp.asarray(dlast, jnp.float32)))
    for name, a, b in zip(NAMES, got, want[:5], strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-6 * np.abs(b).max(), err_msg=name)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("similar", [0.0, 3.0])
def test_contributions_to_dg_cancel(similar) -> None:
    """The error of the log decays' gradient is at most that of the Triton kernels' roundings."""
    operands, _ = draw(128, 64, 64, decay=1e-3, dtype="bfloat16", similar=similar)
    got = jax.jit(partial(gradients.gradients, interpret=True))(*operands)
    want = log_decay_gradients(exact(*operands)[-1])
    triton = exact(*operands, low=lambda x: np.asarray(jnp.asarray(x, "bfloat16"), np.float64))[-1]
    own, other = (np.abs(log_decay_gradients(x) - want).max() for x in (got[4], triton))
    assert own <= other + 1e-6 * np.abs(want).max()


@pytest.mark.skipif(jax.__version_info__ < backend_of_mosaic.JAX, reason="this jax is too old")
@pytest.mark.parametrize(
    ("K", "V", "gate"),
    support.slow_unless(
        lambda K, V, gate: (K, gate) == (96, True),
        [(K, V, gate) for K, V in ((128, 128), (96, 192), (64, 64)) for gate in (True, False)],
    ),
)
def test_lowers_for_cuda(K, V, gate) -> None:
    """Mosaic compiles the kernel to a GPU module; it raises here if it cannot."""
    B, T, H = 2, 1001, 3
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    row = jax.ShapeDtypeStruct((B, -(-T // C), H, C), jnp.float32)
    keys, values, states = shape((B, T, H, K)), shape((B, T, H, V)), shape((B, row.shape[1], H, K, V))
    operands = keys, keys, values, values, row, row if gate else None, states, values, values, states
    text = jax.jit(gradients.gradients).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(("K", "V"), [(128, 128), (96, 192), (64, 64), (128, 256)])
def test_shared_memory_fits(K, V) -> None:
    n = gradients.Sizes(1, 1, K, V, C, 1, jnp.dtype("bfloat16"), True, False, 1)
    assert 2 <= n.stages <= 4
    sizes = [int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in gradients.scratch(n)[:-7]]
    assert sum(sizes) + gradients.REDUCTION + 1024 <= kernel.SHARED
