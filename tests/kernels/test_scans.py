"""`state_scan` and `selective_scan`: both backends against recurrences.

Gradients are compared as well.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import BackendError, backend, selective_scan, state_passing, state_scan
from kernels_pallas.selective_scan import reference as selective_reference
from kernels_pallas.selective_scan import xla as selective_xla
from kernels_pallas.state_scan import reference as state_reference
from seqjax import ops
from tests import extras, support
from tests.kernels.common import assert_close, fast_jit

segments = extras.triton_module("state_scan.triton.segments")

SLOW = pytest.mark.slow
HIGHEST = jax.lax.Precision.HIGHEST


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def with_gradients(f: Any, arrays: Any) -> tuple[Any, Any]:
    """Return f(*arrays) and its gradients, for fixed random cotangents."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(f, *arrays)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)

    @fast_jit
    def run(arrays, cotangents):
        out, pull = jax.vjp(f, *arrays)
        return out, pull(cotangents)

    return run(tuple(arrays), cotangents)


def assert_trees_close(got: Any, want: Any, dtype: str = "float32") -> None:
    leaves, wanted = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
    for (path, g), (_, w) in zip(leaves, wanted, strict=True):
        assert g.dtype == w.dtype, path
        assert_close(g, w, dtype, jax.tree_util.keystr(path), scale=1e-3)


# ------------------------------------------------------------------------------------------------------- state_scan
@pytest.mark.parametrize(("n_chunks", "K", "V", "entries"), [(1, 3, 5, 3), (5, 8, 20, 1), (3, 24, 17, 24)])
def test_states_equal_a_loop(implementation, n_chunks, K, V, entries) -> None:
    B, H = 2, 2
    decay, p, r, s = draw((n_chunks, B, H, entries), (n_chunks, B, H, K, K), (n_chunks, B, H, K, V), (B, H, K, V))
    arrays = (jax.nn.sigmoid(decay), p / K, r, s)

    run = partial(state_scan, precision=HIGHEST, implementation=implementation)
    assert_trees_close(with_gradients(run, arrays), with_gradients(state_reference.state_scan, arrays))


SHAPES = {
    "per head (ssd)": ((2, 5, 1, 3, 1), (2, 5, 4, 3, 7)),
    "per key (wkv6)": ((2, 5, 3, 4, 1), (2, 5, 3, 4, 7)),
    "none (taylor)": ((1, 5, 1, 1, 1), (2, 5, 3, 4, 7)),
    "own": ((2, 1, 3, 4), (2, 1, 3, 4)),
    "alternating": ((2, 5, 3, 1, 4), (2, 5, 3, 2, 4)),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_carried_states_equal_a_loop(implementation, kind) -> None:
    decay, update = draw(*SHAPES[kind])
    arrays = (jax.nn.sigmoid(decay), update, update[:, 0] * 2)

    run = partial(state_passing, implementation=implementation)
    assert_trees_close(with_gradients(run, arrays), with_gradients(state_reference.state_passing, arrays))


@pytest.mark.slow
def test_states_under_vmap_equal_a_loop(implementation) -> None:
    n, c, B, H, K, V = 3, 2, 1, 2, 4, 5
    arrays = draw((n, c, B, H, K), (n, c, B, H, K, K), (n, c, B, H, K, V), (n, B, H, K, V))
    run = partial(state_scan, precision=HIGHEST, implementation=implementation)
    each = [run(*(x[i] for x in arrays)) for i in range(n)]
    assert_trees_close(jax.vmap(run)(*arrays), jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_other_problems_are_refused_with_a_reason() -> None:
    decay, p, r, s = draw((2, 1, 1, 1), (2, 1, 1, 160, 160), (2, 1, 1, 160, 4), (1, 1, 160, 4))
    # Where Triton cannot run at all, the message gives that reason instead.
    with pytest.raises(BackendError, match=r"key dim 160 .*128|Triton"):
        state_scan(decay, p, r, s, precision=HIGHEST, implementation="triton")
    with pytest.raises(BackendError, match="no pallas"):
        state_scan(decay, p, r, s, precision=HIGHEST, implementation="pallas")


# --------------------------------------------------------------------------------------------------- selective_scan
def scan_arrays(B, T, E, N, *, dt=0.3, dtype="float32", seed=0) -> list[jax.Array]:
    x, step, a, b, c, d, state = draw((B, T, E), (B, T, E), (E, N), (B, T, N), (B, T, N), (E,), (B, E, N), seed=seed)
    x, b, c = (t.astype(dtype) for t in (x, b, c))
    return [x, dt * jnp.exp(step), -jnp.exp(0.5 * a), b, c, d, state]


# One position; less than a chunk; many chunks, processed in sequence and (with a single channel block) in parallel; N =
# 1 and steps so large that the state forgets at once; states over so many lanes that a thread has several channels.
CASES = [((1, 1, 5, 4), 0.3), ((2, 5, 6, 3), 0.3), ((2, 21, 9, 4), 0.3), ((1, 37, 3, 4), 30.0), ((1, 20, 4, 1), 0.3)]
CASES += [((1, 11, 5, 40), 0.3)]


@pytest.mark.parametrize(
    ("programs", "chunks", "work", "length"),
    [
        (24, 1600, 3.0, 100),  # RWKV-7, one sequence of 102,400: 16 segments
        (24, 1601, 3.0, 101),  # the last has 86 chunks
        (48, 1600, 3.0, 200),
        (96, 1600, 3.0, 1600),  # 4 segments with three times the work
        (96, 1600, 2.0, 400),
        (24, 49, 3.0, 9),  # segments have at least 8 chunks
        (24, 47, 3.0, 47),
        (384, 32, 3.0, 32),  # 16 x 2,048 tokens
        (1000, 1600, 2.0, 1600),
    ],
)
def test_segment_length_fills_the_gpu(programs, chunks, work, length) -> None:
    assert segments.length(programs, chunks, work=work) == length


@pytest.mark.parametrize(
    ("shape", "dt"), support.slow_unless(lambda *case: case not in (CASES[1], CASES[4]), CASES), ids=str
)
def test_scan_equals_the_recurrence(implementation, shape, dt) -> None:
    arrays = scan_arrays(*shape, dt=dt)
    run = partial(selective_scan, implementation=implementation)
    assert_trees_close(with_gradients(run, arrays), with_gradients(selective_reference.selective_scan, arrays))


@pytest.mark.parametrize(
    ("shape", "dt"), [CASES[0], CASES[3], ((2, 21, 3, 4), 0.3), pytest.param(*CASES[4], marks=SLOW)], ids=str
)
def test_the_chunked_xla_scan_equals_the_recurrence(monkeypatch, shape, dt) -> None:
    """On a CPU xla scans token by token.

    This tests its chunked form for other devices, over several groups.
    """
    monkeypatch.setattr(backend.device, "platform", lambda: "gpu")
    monkeypatch.setattr(selective_xla, "GROUP", 2)
    arrays = scan_arrays(*shape, dt=dt)
    run = partial(selective_scan, chunk_size=4, implementation="xla")
    assert selective_xla.load() is selective_xla
    assert_trees_close(with_gradients(run, arrays), with_gradients(selective_reference.selective_scan, arrays))


def test_small_steps_stay_accurate_after_a_large_step(monkeypatch) -> None:
    """Small step sizes after a large one are not rounded away.

    Sums from the chunk's start would lose them.
    """
    monkeypatch.setattr(backend.device, "platform", lambda: "gpu")
    x, dt, *others = scan_arrays(1, 8, 3, 2, dt=1e-3)
    arrays = (x, dt.at[:, 1].set(1e5), *others)
    run = partial(selective_scan, chunk_size=4, implementation="xla")
    for got, want in zip(run(*arrays), selective_reference.selective_scan(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_chunk_size_does_not_change_the_scan() -> None:
    """The CPU's chunk size does not divide the length."""
    arrays = scan_arrays(2, 21, 5, 3)
    run = partial(selective_scan, chunk_size=8, implementation="xla")
    assert_trees_close(with_gradients(run, arrays), with_gradients(selective_reference.selective_scan, arrays))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=SLOW)])
def test_scan_of_16_bit_inputs_rounds_only_its_outputs(implementation, dtype) -> None:
    arrays = scan_arrays(2, 21, 8, 16, dtype=dtype)
    got = with_gradients(partial(selective_scan, implementation=implementation), arrays)
    wide = [x.astype(jnp.float32) for x in arrays]
    out, pull = jax.vjp(selective_reference.selective_scan, *wide)
    rng = np.random.default_rng(1)
    cotangents = [jnp.asarray(rng.normal(size=x.shape), y.dtype).astype(x.dtype) for x, y in zip(out, got[0])]
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves((out, pull(tuple(cotangents)))), strict=True):
        assert_close(g, w, dtype if g.dtype == dtype else "float32", scale=1e-3)


@pytest.mark.parametrize(
    ("dtype", "shape"),  # for a whole pass and for segments
    [
        ("float32", (2, 21, 9, 4)),
        ("bfloat16", (1, 37, 3, 4)),
        pytest.param("float32", (1, 37, 3, 4), marks=SLOW),
        pytest.param("bfloat16", (2, 21, 9, 4), marks=SLOW),
    ],
    ids=str,
)
def test_dt_bias_and_its_gradient(implementation, shape, dtype) -> None:
    """Compare with softplus in float64; bf16 rounds only results."""
    x, _, *rest = scan_arrays(*shape, dtype=dtype)
    logits, bias = draw(shape[:3], shape[2:3], seed=2)
    arrays = (x, (4 * logits).astype(dtype), *rest, 2 * bias - 3)

    def run(*arrays):
        return selective_scan(*arrays[:-1], dt_bias_E=arrays[-1], implementation=implementation)

    def want(x, dt, *rest):
        *rest, bias = rest
        return selective_reference.selective_scan(x, jax.nn.softplus(dt + bias), *rest)

    got = with_gradients(run, arrays)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in arrays]
        out, pull = jax.vjp(want, *wide)
        rng = np.random.default_rng(1)
        cotangents = [jnp.asarray(rng.normal(size=x.shape), y.dtype).astype(x.dtype) for x, y in zip(out, got[0])]
        expected = jax.tree.leaves((out, pull(tuple(cotangents))))
    for g, w in zip(jax.tree.leaves(got), expected, strict=True):
        assert_close(g, w, dtype if g.dtype == dtype else "float32", scale=1e-3)


def test_biased_step_sizes_are_exact_to_float32(implementation) -> None:
    """Steps start at 2e-9, where 1 + e^z is 1 in float32.

    A base-2 exponent up to 29 rounds to 2e-6 relative to the result.
    """
    z = np.linspace(-20, 20, 201, dtype=np.float32)
    one, E = jnp.ones, len(z)
    arrays = (one((1, 1, E)), jnp.asarray(z)[None, None], -one((E, 1)), one((1, 1, 1)), one((1, 1, 1)), jnp.zeros(E))
    y, _ = selective_scan(*arrays, jnp.zeros((1, E, 1)), dt_bias_E=jnp.zeros(E), implementation=implementation)
    np.testing.assert_allclose(y[0, 0], np.logaddexp(z.astype(np.float64), 0), rtol=3e-6)


def test_scan_is_causal_and_deterministic(implementation) -> None:
    arrays = scan_arrays(1, 29, 6, 4)
    run = partial(selective_scan, implementation=implementation)
    first, again = with_gradients(run, arrays), with_gradients(run, arrays)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    changed = [x.at[:, 17:].multiply(2) if i in (0, 1, 3, 4) else x for i, x in enumerate(arrays)]
    np.testing.assert_array_equal(with_gradients(run, changed)[0][0][:, :17], first[0][0][:, :17])


@pytest.mark.slow
def test_scan_under_vmap_equals_a_loop(implementation) -> None:
    each = [scan_arrays(1, 9, 4, 4, seed=seed) for seed in range(2)]
    run = partial(selective_scan, implementation=implementation)
    stacked = [jnp.stack(x) for x in zip(*each, strict=True)]
    assert_trees_close(jax.vmap(run)(*stacked), jax.tree.map(lambda *x: jnp.stack(x), *(run(*x) for x in each)))


# -------------------------------------------------------------------------------------------------------- whole ops
def op_arrays(name: str) -> list[jax.Array]:
    B, T, H, K, V = 1, 21, 2, 6, 5
    k, r, a, v = (B, T, H, K), (B, T, H, K), (B, T, H, K), (B, T, H, V)
    q, k, a, v, gate, u = draw(r, k, a, v, (B, T, H), (H, K))
    unit = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    slow = -0.6 * jax.nn.sigmoid(a)
    return {
        "gated_delta_rule": [q, unit, v, jax.nn.sigmoid(gate), -jnp.exp(gate)],
        "wkv7": [q, k, v, slow, -unit, unit * 0.5],
        "wkv6": [q, k, v, slow, u],
        "ssd": [v, -jnp.exp(gate), q[:, :, 0], k[:, :, 0]],
        "taylor_linear_attention": [q, k, v],
    }[name]


@pytest.mark.parametrize(
    "name",
    ["gated_delta_rule", *(pytest.param(n, marks=SLOW) for n in ("wkv7", "wkv6", "ssd", "taylor_linear_attention"))],
)
@pytest.mark.parametrize("implementation", ["triton"])
def test_triton_ops_equal_xla_ops(monkeypatch, name, implementation) -> None:
    run, arrays, pick = partial(getattr(ops, name), chunk_size=8), op_arrays(name), backend.pick
    want = with_gradients(run, arrays)
    jax.clear_caches()  # jax.checkpoint caches the trace, including the chosen backend
    monkeypatch.setattr(backend, "pick", lambda op, backends, _, *rest: pick(op, backends, implementation, *rest))
    assert_trees_close(with_gradients(run, arrays), want)
    own = {"ssd": "ssd", "gated_delta_rule": "delta_rule", "wkv6": "linear_attention", "wkv7": "linear_attention"}
    op = own.get(name, "state_scan")
    assert kp.backends_used()[op] == implementation
    jax.clear_caches()
