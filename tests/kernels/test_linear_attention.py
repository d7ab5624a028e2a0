"""Linear attention with a decay per channel: both backends against float64.

Kinds: `bonus` is RWKV-5 and 6, `plain` is GLA, `low_rank` is RWKV-7, and `correction` is KDA, with b = k.
"""

import math
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import backend
from kernels_pallas.linear_attention import reference
from kernels_pallas.linear_attention.triton import refusal
from kernels_pallas.triton import runtime
from tests import extras, support
from tests.kernels.common import assert_close, assert_each_close, count_primitive, fast_jit, outputs_and_gradients

scan = extras.triton_module("linear_attention.triton.scan")

NAMES = ("r", "k", "v", "log_w", "u", "a", "b", "state")
KINDS = ("bonus", "plain", "low_rank", "correction")


def draw(kind, T, K, V, *, decay: float, B=1, H=2, dtype="float32", seed=0) -> list[Any]:
    """Draw r, k, v, log_w, u, a, b and state.

    Decays are around -`decay`; a and b are distributed as in the mixers.
    """
    rng = np.random.default_rng(seed)
    keys = (B, T, H, K)
    r, k, kappa = (rng.normal(size=keys) for _ in range(3))
    r, k, kappa = r / math.sqrt(K), k / math.sqrt(K), kappa / np.linalg.norm(kappa, axis=-1, keepdims=True)
    v, state, u = rng.normal(size=(B, T, H, V)), rng.normal(size=(B, H, K, V)), rng.normal(size=(H, K))
    log_w = -decay * np.exp(0.5 * rng.normal(size=keys))
    a, b = -kappa, kappa / (1 + np.exp(-2 * rng.normal(size=keys)))
    if kind == "correction":
        beta = 1 / (1 + np.exp(-2 * rng.normal(size=(B, T, H, 1))))
        k, a = beta * kappa, -np.exp(log_w) * kappa
    wide = [jnp.asarray(x, jnp.float32) for x in (log_w, u, state)]
    r, k, v, a, b = (jnp.asarray(x, dtype) for x in (r, k, v, a, b))
    low = {"low_rank": (a, b), "correction": (a, None)}.get(kind, (None, None))
    return [r, k, v, wide[0], wide[1] if kind == "bonus" else None, *low, wide[2]]


def op(r, k, v, log_w, u, a, b, state, *, chunk=64, min_log_w=-math.inf, implementation=None):
    low_rank = None if a is None else (a, b)
    options = {"min_log_w": min_log_w, "chunk_size": chunk, "implementation": implementation}
    return kp.linear_attention(r, k, v, log_w, u, state, low_rank=low_rank, **options)


with_gradients = partial(outputs_and_gradients, like=partial(op, implementation="xla"), names=NAMES)
assert_trees_close = partial(assert_each_close, of_ones="log_w")


# Several chunks with a partial last chunk; values and keys with several blocks, a partial block, and different widths;
# lengths of exactly one chunk, one more and one less; decays that forget within a position, need several halving
# levels, need none, and hardly forget.
CASES = [
    ("low_rank", (37, 20, 8), 16, 3.0),
    ("bonus", (70, 8, 20), 64, 0.3),
    ("plain", (1, 5, 6), 64, 0.3),
    ("correction", (65, 8, 16), 64, 3.0),
    ("bonus", (5, 6, 3), 64, 1e-3),
    ("bonus", (64, 20, 20), 64, 3.0),
    ("bonus", (64, 8, 20), 64, 30.0),
    ("low_rank", (63, 8, 20), 64, 1e-3),
    ("plain", (130, 20, 40), 64, 10.0),
    ("plain", (65, 16, 16), 32, 0.3),
    ("correction", (130, 20, 24), 64, 30.0),
    ("low_rank", (45, 8, 8), 5, 0.6),
    ("low_rank", (1, 5, 6), 64, 0.3),
    ("low_rank", (70, 20, 8), 64, 3.0),
]
QUICK = CASES[:4]


@cache  # shared by all implementations
def wanted(kind: str, shape: tuple[int, ...], decay: float) -> Any:
    return with_gradients(reference.linear_attention, draw(kind, *shape, decay=decay), wide=True)


@pytest.mark.parametrize(
    ("kind", "shape", "chunk", "decay"), support.slow_unless(lambda *case: case in QUICK, CASES), ids=str
)
def test_equals_the_recurrence(implementation, kind, shape, chunk, decay) -> None:
    got = with_gradients(partial(op, chunk=chunk, implementation=implementation), draw(kind, *shape, decay=decay))
    # With a bonus, xla computes g - log w from sums that reach 2,000 for decays of e^-30, where float32 has steps of
    # 1.2e-4.
    slack = 6 if implementation == "xla" and kind == "bonus" and decay == 30.0 else 1
    assert_trees_close(got, wanted(kind, shape, decay), slack=slack)


@pytest.mark.parametrize("kind", ["plain", "low_rank"])
def test_long_chunks_of_several_sequences_on_xla(kind) -> None:
    """A chunk of 256 is halved four times.

    With an axis per level, XLA's CPU products would have too many dimensions and end the process.
    """
    arrays = draw(kind, 300, 4, 4, decay=3.0, B=2)
    want = fast_jit(reference.linear_attention)(*arrays)
    assert_trees_close(fast_jit(partial(op, chunk=256, implementation="xla"))(*arrays), want)


MILD = [("low_rank", (70, 20, 8), 0.6), ("correction", (65, 8, 16), 3.0), ("low_rank", (63, 8, 20), 1e-3)]


@pytest.mark.parametrize(("kind", "shape", "decay"), support.slow_unless(lambda *case: case == MILD[0], MILD), ids=str)
def test_bounded_decays_equal_the_recurrence(kind, shape, decay) -> None:
    """xla then uses growing factors: decays in a chunk sum to less than 80."""
    arrays = draw(kind, *shape, decay=decay)
    low = float(arrays[3].min())
    run = partial(op, chunk=min(64, max(1, int(-79 / low))), min_log_w=low, implementation="xla")
    assert_trees_close(with_gradients(run, arrays), wanted(kind, shape, decay))


@pytest.mark.parametrize("kind", support.slow_unless(lambda kind: kind == "low_rank", KINDS))
@pytest.mark.parametrize("implementation", ["triton"])
def test_kernels_for_bounded_decays_equal_the_recurrence(implementation, kind) -> None:
    """These kernels only handle sums above -59 over a chunk of 64."""
    shape, decay = (130, 20, 24), 0.1
    arrays = draw(kind, *shape, decay=decay)
    low = float(arrays[3].min())
    assert -scan.STRONGEST < 64 * low < -20
    run = partial(op, min_log_w=low, implementation=implementation)
    assert_trees_close(with_gradients(run, arrays), wanted(kind, shape, decay))


def test_the_decay_bound_matches_the_kernels() -> None:
    weight_kernels = extras.triton_module("linear_attention.triton.weight_kernels")

    assert math.exp(scan.STRONGEST) < 2.0**weight_kernels.BOUND.value < math.exp(scan.STRONGEST + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "kind"),
    [*(("triton", kind) for kind in KINDS), ("xla", "low_rank"), ("xla", "correction")],
)
def test_mixed_decay_scales_in_a_chunk(implementation, kind) -> None:
    """Sums of log w reach -1,000, where float32 rounding is 6e-5.

    This is three times the tolerance 2e-5.
    """
    arrays = draw(kind, 130, 8, 20, decay=1.0)
    sizes = np.random.default_rng(2).choice([1e-4, 0.05, 1.0, 30.0], size=arrays[3].shape)
    arrays[3] = jnp.asarray(-sizes, jnp.float32).at[:, 50].set(-1e4)  # below the floor
    got = with_gradients(partial(op, implementation=implementation), arrays)
    assert_trees_close(got, with_gradients(reference.linear_attention, arrays, wide=True), slack=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("implementation", ["triton"])
def test_gradients_match_xla(implementation, kind) -> None:
    arrays = draw(kind, 100, 8, 20, decay=0.3, B=2)

    def grad(name: str) -> Any:
        return with_gradients(partial(op, implementation=name), arrays)

    assert_trees_close(grad(implementation), grad("xla"))


# Number of 16-bit roundings on a gradient's longest path, with a low-rank part: S and U in the forward pass (a|k, Y, X,
# a~, E, S, U), then dY (r|b, X, b^, F, L, dY), d(a|b), its partner's weight, and the result. Independent errors of at
# most u each sum to sqrt(16) u relative to the terms.
ROUNDINGS, UNIT = 16, 2.0**-8


def assert_16_bits_close(got: Any, want: Any) -> None:
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        worst = np.abs(g.astype(np.float64) - w).max() / np.abs(w).max()
        assert worst <= math.sqrt(ROUNDINGS) * UNIT, (jax.tree_util.keystr(path), worst)


@pytest.mark.parametrize(
    ("kind", "decay"),
    support.slow_unless(
        lambda *case: case == ("low_rank", 0.3), [(kind, decay) for kind in KINDS for decay in (0.3, 0.01)]
    ),
)
def test_16_bit_inputs_round_operands_only(implementation, kind, decay) -> None:
    arrays = draw(kind, 130, 16, 24, decay=decay, dtype="bfloat16")
    got = with_gradients(partial(op, implementation=implementation), arrays)
    assert [x.dtype for x in got[0]] == [jnp.bfloat16, np.float32]
    for name, x in zip(NAMES, arrays, strict=True):
        assert x is None or got[1][name].dtype == x.dtype
    assert_16_bits_close(got, with_gradients(reference.linear_attention, arrays, wide=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "K", "V"), [("bonus", 64, 64), ("low_rank", 64, 64), ("correction", 128, 128), ("plain", 96, 192)]
)
@pytest.mark.parametrize("implementation", ["triton"])
def test_with_real_head_sizes_and_gpu_tiles(monkeypatch, implementation, kind, K, V) -> None:
    monkeypatch.setattr(scan, "tile", lambda kernel, dtype: scan.TILES[kernel, jnp.finfo(dtype).bits])
    arrays = draw(kind, 70, K, V, decay=0.1, dtype="bfloat16", H=1)
    got = with_gradients(partial(op, implementation=implementation), arrays)
    assert_16_bits_close(got, with_gradients(reference.linear_attention, arrays, wide=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "V"), [(64, 64), (96, 96), (128, 128)])
@pytest.mark.parametrize("decay", [0.1, 3.0])
@pytest.mark.parametrize("implementation", ["triton"])
def test_loading_ahead_changes_no_bit(monkeypatch, implementation, K, V, decay) -> None:
    """`weights` reads sums that other threads of the program wrote before."""
    arrays = draw("correction", 200, K, V, decay=decay, dtype="bfloat16", H=1)
    run = partial(op, implementation=implementation)
    got, usual = with_gradients(run, arrays), scan.stages_of
    for stages in (1, 2):
        # The reverse `pass` loads one chunk ahead by default; a third has no room in shared memory at 128.
        monkeypatch.setattr(
            scan, "stages_of", lambda kernel, *args, n=stages, **crowded: (
                n if kernel in ("weights", "pass") else usual(kernel, *args, **crowded)
            )
        )  # fmt: skip
        jax.clear_caches()
        jax.tree.map(np.testing.assert_array_equal, got, with_gradients(run, arrays))


# Five chunks of 16 give three segments, the last with one chunk; three or four chunks give two. Values and keys have
# several blocks, including a partial block. Some decays forget within a position; some hardly forget.
SEGMENTS = [
    ("low_rank", (70, 8, 20), 0.3),
    ("bonus", (70, 8, 20), 0.3),
    ("plain", (70, 8, 20), 1e-3),
    ("correction", (40, 8, 20), 0.3),
    ("correction", (70, 20, 24), 0.3),
    ("low_rank", (70, 24, 20), 1e-3),
    ("low_rank", (64, 8, 8), 30.0),
    ("bonus", (70, 20, 8), 30.0),
    ("correction", (70, 8, 20), 30.0),
]


@pytest.mark.parametrize(
    ("kind", "shape", "decay"),
    support.slow_unless(lambda *case: case in SEGMENTS[:2], SEGMENTS),
    ids=str,
)
@pytest.mark.parametrize("implementation", ["triton"])
def test_segments_of_time_equal_the_recurrence(short_segments, implementation, kind, shape, decay) -> None:
    arrays = draw(kind, *shape, decay=decay, B=2)
    got = with_gradients(partial(op, chunk=16, implementation=implementation), arrays)
    assert_trees_close(got, with_gradients(reference.linear_attention, arrays, wide=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "decay"), [("low_rank", 0.3), ("low_rank", 0.01), ("bonus", 0.01), ("correction", 0.3)]
)
@pytest.mark.parametrize("implementation", ["triton"])
def test_segments_of_16_bit_inputs_round_operands_only(short_segments, implementation, kind, decay) -> None:
    """M has rounded operands, like the state."""
    arrays = draw(kind, 70, 16, 24, decay=decay, B=2, dtype="bfloat16")
    got = with_gradients(partial(op, chunk=16, implementation=implementation), arrays)
    assert_16_bits_close(got, with_gradients(reference.linear_attention, arrays, wide=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bonus", "low_rank", "correction"])
@pytest.mark.parametrize("implementation", ["triton"])
def test_segments_are_causal_and_under_vmap_equal_a_loop(short_segments, implementation, kind) -> None:
    each = [draw(kind, 70, 6, 4, decay=0.3, seed=seed) for seed in range(2)]
    run = fast_jit(partial(op, chunk=16, implementation=implementation))
    first, last = run(*each[0])
    np.testing.assert_array_equal(first, run(*each[0])[0])
    changed = [x if x is None or x.shape[:2] != (1, 70) else x.at[:, 39:].multiply(0.5) for x in each[0]]
    np.testing.assert_array_equal(run(*changed)[0][:, :39], first[:, :39])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    got = fast_jit(jax.vmap(partial(op, chunk=16, implementation=implementation)))(*stacked)
    assert_trees_close([x[0] for x in got], [first, last])
    assert_trees_close([x[1] for x in got], list(run(*each[1])))


def test_a_constant_decay_and_no_state(implementation) -> None:
    r, k, v, log_w, u, *_, state = draw("bonus", 20, 8, 6, decay=0.3)
    f = partial(kp.linear_attention, chunk_size=64, implementation=implementation)
    got = fast_jit(f)(r, k, v, log_w[:1, :1], u)
    want = fast_jit(reference.linear_attention)(
        r, k, v, jnp.broadcast_to(log_w[:, :1], log_w.shape), u, None, None, jnp.zeros_like(state)
    )
    assert_trees_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_is_causal_and_deterministic(implementation, kind) -> None:
    arrays = draw(kind, 70, 6, 4, decay=0.3)
    run = partial(op, implementation=implementation)
    first, again = with_gradients(run, arrays), with_gradients(run, arrays)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    changed = [
        x.at[:, 29:].multiply(0.5) if name not in ("u", "state") and x is not None else x
        for name, x in zip(NAMES, arrays, strict=True)
    ]
    np.testing.assert_array_equal(with_gradients(run, changed)[0][0][:, :29], first[0][0][:, :29])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bonus", "low_rank"])
def test_chunk_size_changes_nothing(implementation, kind) -> None:
    arrays = draw(kind, 50, 6, 4, decay=0.3)
    want = with_gradients(partial(op, chunk=16, implementation=implementation), arrays)
    for chunk in (5, 48, 300):  # triton rounds these to 16, 64, 64
        assert_trees_close(with_gradients(partial(op, chunk=chunk, implementation=implementation), arrays), want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bonus", "low_rank", "correction"])
def test_under_vmap_and_checkpoint_equals_a_loop(implementation, kind) -> None:
    each = [draw(kind, 19, 4, 6, decay=0.3, seed=seed) for seed in range(2)]
    run = partial(op, implementation=implementation)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    want = jax.tree.map(lambda *x: np.stack(x), *(with_gradients(run, x)[0] for x in each))
    assert_trees_close(fast_jit(jax.vmap(run))(*stacked), want)
    assert_trees_close(with_gradients(jax.checkpoint(run), each[0]), with_gradients(run, each[0]))
    grad = jax.grad(lambda *a: run(*a)[0].sum(), argnums=3)
    assert_close(fast_jit(jax.vmap(grad))(*stacked)[1], fast_jit(grad)(*each[1]), "float32")


@pytest.mark.parametrize(
    "kind", support.slow_unless(lambda kind: kind == "low_rank", ("bonus", "low_rank", "correction"))
)
@pytest.mark.parametrize("implementation", ["triton"])
def test_a_policy_that_keeps_states_and_inverses_repeats_no_kernel(implementation, kind) -> None:
    arrays = draw(kind, 20, 4, 4, decay=0.3)

    def passes(policy: Any) -> int:
        """Run forward, backward, and forward again."""
        run = jax.checkpoint(lambda *x: op(*x, implementation=implementation)[0].sum(), policy=policy)
        return count_primitive(jax.make_jaxpr(jax.grad(run))(*arrays).jaxpr, "custom_vmap_call")

    saved = jax.checkpoint_policies.save_only_these_names("chunk_inverse", "chunk_states")
    assert (passes(saved), passes(None)) == (2, 3)


def problem(*, dtype="bfloat16", K=96, V=192, wide="float32") -> backend.Problem:
    k, v, state = ((1, 8, 2, K), dtype), ((1, 8, 2, V), dtype), ((1, 2, K, V), wide)
    operands = tuple(
        jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in (k, k, v, (k[0], wide), state, ((2, K), wide))
    )
    return backend.Problem("gpu", operands, {"chunk_size": 64})


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(dtype="float32", K=5, V=3)) is None
    assert re.search("key dim 160 .* 128", str(refusal(problem(K=160))))
    assert re.search("value dim 320 .* 256", str(refusal(problem(V=320))))
    assert "operands are bfloat16" in str(refusal(problem(wide="bfloat16")))
    assert re.search("float16 and float32; v .*bfloat16, float32", str(refusal(problem(dtype="float16"))))


def test_double_precision_uses_xla() -> None:
    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda x: x.astype(jnp.float64), draw("bonus", 20, 4, 4, decay=0.3))
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton)"):
            op(*arrays, implementation="triton")
        assert [x.dtype for x in jax.eval_shape(op, *arrays)] == [jnp.float64] * 2
    assert kp.backends_used()["linear_attention"] == "xla"


def test_unsupported_options_are_refused() -> None:
    r, k, v, log_w, u, a, b, state = draw("low_rank", 4, 4, 4, decay=0.3)
    with pytest.raises(ValueError, match="chunk_size"):
        op(r, k, v, log_w, u, a, b, state, chunk=0)
    with pytest.raises(ValueError, match=r"bonus u .*low-rank"):
        op(r, k, v, log_w, jnp.ones((2, 4)), a, b, state)
