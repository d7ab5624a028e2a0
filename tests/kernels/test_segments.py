"""Packed documents: each op equals its reference on every document."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import segments
from kernels_pallas.delta_rule import reference as delta_rule
from kernels_pallas.linear_attention import reference as linear_attention
from kernels_pallas.short_conv import reference as short_conv
from kernels_pallas.ssd import reference as ssd
from kernels_pallas.token_shift import reference as token_shift
from tests import support
from tests.kernels.common import assert_each_close, fast_jit, outputs_and_gradients

# Documents inside a chunk of 16 tokens, of one token, at the edges of chunks, and over several chunks.
LENGTHS = ((5, 11, 1, 2, 18), (16, 16, 5))
B, T, H, K, V, E = 2, 37, 2, 6, 5, 20


def numbered(lengths: Any = LENGTHS) -> jax.Array:
    """Return the segments [B, T] of documents with these lengths; the numbers have gaps."""
    return jnp.asarray([np.repeat(3 + 2 * np.arange(len(row)), row) for row in lengths], jnp.int32)


class Op(NamedTuple):
    """An op and its reference, called with named operands; the first result has time on axis 1.

    `state` is the operand that continues the first document, and `shared` are the operands without a batch axis.
    """

    call: Callable[..., Any]
    reference: Callable[..., Any]
    draw: Callable[[Callable[..., np.ndarray]], dict[str, np.ndarray]]
    state: str = "state"
    shared: tuple[str, ...] = ()


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _qkv(normal: Any) -> dict[str, np.ndarray]:
    return {"q": normal(B, T, H, K), "k": _unit(normal(B, T, H, K)), "v": normal(B, T, H, V)}


def _delta_rule(gated: bool) -> Op:
    def draw(normal: Any) -> dict[str, np.ndarray]:
        gate = {"log_g": -np.exp(normal(B, T, H))} if gated else {}
        return _qkv(normal) | {"beta": 2 / (1 + np.exp(-normal(B, T, H)))} | gate | {"state": normal(B, H, K, V)}

    def call(f: Callable, *, q, k, v, beta, state, log_g=None, **options) -> Any:
        return f(q, k, v, beta, log_g, state, **options)

    return Op(partial(call, kp.delta_rule, chunk_size=16), partial(call, delta_rule.delta_rule), draw)


def _linear_attention(kind: str) -> Op:
    def draw(normal: Any) -> dict[str, np.ndarray]:
        log_w = -np.exp(normal(B, T, H, K))
        operands = _qkv(normal) | {"log_w": np.maximum(log_w, -0.6) if kind == "bounded" else log_w}
        if kind == "bonus":
            operands["u"] = normal(H, K)
        if kind in ("tied", "low_rank", "bounded"):
            operands["a"] = -_unit(normal(B, T, H, K))
        if kind in ("low_rank", "bounded"):
            operands["b"] = -operands["a"] / (1 + np.exp(normal(B, T, H, 1)))
        return operands | {"state": normal(B, H, K, V)}

    def call(*, q, k, v, log_w, state, u=None, a=None, b=None, **options) -> Any:
        if kind == "bounded":
            options["min_log_w"] = -0.6
        low_rank = None if a is None else (a, b)
        return kp.linear_attention(q, k, v, log_w, u, state, low_rank=low_rank, chunk_size=16, **options)

    def reference(*, q, k, v, log_w, state, u=None, a=None, b=None) -> Any:
        return linear_attention.linear_attention(q, k, v, log_w, u, a, b, state)

    return Op(call, reference, draw, shared=("u",))


def _ssd() -> Op:
    def draw(normal: Any) -> dict[str, np.ndarray]:
        operands = {"x": normal(B, T, H, V), "log_a": -np.exp(normal(B, T, H)), "dt": np.abs(normal(B, T, H))}
        return operands | {"b": normal(B, T, K), "c": normal(B, T, K), "state": normal(B, H, K, V)}

    def call(f: Callable, *, x, log_a, b, c, dt, state, **options) -> Any:
        return f(x, log_a, b, c, state, dt, **options)

    return Op(partial(call, kp.ssd, chunk_size=16), partial(call, ssd.ssd), draw)


def _short_conv(heads: int | None) -> Op:
    def draw(normal: Any) -> dict[str, np.ndarray]:
        return {"x": normal(B, T, E), "w": normal(E, 4), "b": normal(E), "last": normal(B, 3, E)}

    def call(f: Callable, *, x, w, b, last, **options) -> Any:
        return f(x, w, b, last, silu=True, l2_heads=heads, **options)

    return Op(partial(call, kp.short_conv), partial(call, short_conv.short_conv), draw, "last", ("w", "b"))


def _token_shift(moved: bool) -> Op:
    def draw(normal: Any) -> dict[str, np.ndarray]:
        moves = {"moves": normal(B, T, 3, E)} if moved else {}
        return {"x": normal(B, T, E), "mus": normal(3, E), **moves, "last": normal(B, E)}

    def call(f: Callable, *, x, mus, last, moves=None, **options) -> Any:
        moves_NBTD = None if moves is None else jnp.moveaxis(moves, 2, 0)
        return jnp.stack(f(x, last, tuple(mus), moves_NBTD, **options), 2)

    return Op(partial(call, kp.token_shift), partial(call, token_shift.token_shift), draw, "last", ("mus",))


OPS = {
    "short_conv": _short_conv(None),
    "short_conv-l2": _short_conv(2),
    "token_shift": _token_shift(False),
    "token_shift-moved": _token_shift(True),
    "delta_rule": _delta_rule(False),
    "delta_rule-gated": _delta_rule(True),
    "linear_attention": _linear_attention("plain"),
    "linear_attention-bonus": _linear_attention("bonus"),
    "linear_attention-bounded": _linear_attention("bounded"),
    "linear_attention-low_rank": _linear_attention("low_rank"),
    "linear_attention-tied": _linear_attention("tied"),
    "ssd": _ssd(),
}


def each_op(*quick: str) -> pytest.MarkDecorator:
    """Run a test for all ops; it is slow for the others."""
    return pytest.mark.parametrize("name", support.slow_unless(lambda name: name in quick, OPS))


def draw(name: str, dtype: str = "float32", seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    wide = ("beta", "log_g", "log_w", "log_a", "dt", "u", "w", "b", "mus", "state")
    operands = OPS[name].draw(lambda *shape: rng.normal(size=shape))
    narrow = {key for key in operands if key not in wide or (key == "b" and not name.startswith("short_conv"))}
    return {key: jnp.asarray(x, dtype if key in narrow else "float32") for key, x in operands.items()}


def documents(op: Op, lengths: Any, **operands: jax.Array) -> Any:
    """Return the reference's results on each document separately."""
    rows = []
    for i, row in enumerate(lengths):
        own = {key: x if key in op.shared else x[i : i + 1] for key, x in operands.items()}
        pieces, last, start = [], [], 0
        for n in row:
            piece = {
                key: x if key in op.shared or key == op.state else x[:, start : start + n] for key, x in own.items()
            }
            out = op.reference(**piece)
            y, *last = out if isinstance(out, tuple) else (out,)
            pieces.append(y)
            own[op.state], start = jnp.zeros_like(own[op.state]), start + n
        rows.append((jnp.concatenate(pieces, 1), *last))
    return tuple(jnp.concatenate(x) for x in zip(*rows, strict=True))


def packed(op: Op, lengths: Any = LENGTHS, *, implementation: str | None, **operands: jax.Array) -> tuple[Any, ...]:
    out = op.call(**operands, segments=numbered(lengths), implementation=implementation)
    return out if isinstance(out, tuple) else (out,)


def with_gradients(name: str, f: Callable, operands: dict[str, jax.Array], wide: bool = False) -> Any:
    """Return the results and gradients of `f(op, LENGTHS, **operands)`."""

    def named(f: Callable) -> Callable:
        return lambda *arrays: f(OPS[name], LENGTHS, **dict(zip(operands, arrays, strict=True)))

    like = named(partial(packed, implementation="xla"))
    return outputs_and_gradients(named(f), list(operands.values()), wide, like=like, names=list(operands))


@cache  # shared by all implementations
def wanted(name: str, dtype: str) -> Any:
    return with_gradients(name, documents, draw(name, dtype), wide=True)


# A running sum of log decays over a chunk of 16 contains three boundaries, each an error of 8e-6 in the exponents.
SLACK = 2.0


@each_op("short_conv", "delta_rule-gated")
def test_equals_the_reference_on_each_document(implementation, name) -> None:
    got = with_gradients(name, partial(packed, implementation=implementation), draw(name))
    assert_each_close(got, wanted(name, "float32"), slack=SLACK, of_ones="log_")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_bf16_operands(implementation, name) -> None:
    got = with_gradients(name, partial(packed, implementation=implementation), draw(name, "bfloat16"))
    assert_each_close(got, wanted(name, "bfloat16"), "bfloat16", of_ones="log_")


EDGES = ((16, 21), (32, 5))


@each_op("linear_attention-tied")
def test_nothing_crosses_a_boundary_between_chunks(implementation, name) -> None:
    """Bits and zeros are exact at the edge of a chunk.

    Inside a chunk, running sums of log decays and of their gradients round with all tokens of the chunk.
    """
    op, mine, other = OPS[name], draw(name), draw(name, seed=1)
    second_BT = numbered(EDGES) != numbered(EDGES)[:, :1]

    def mixed(key: str) -> jax.Array:
        if key in op.shared:
            return mine[key]
        return (
            other[key]
            if key == op.state
            else segments.keep(second_BT, mine[key]) + segments.keep(~second_BT, other[key])
        )

    @fast_jit
    def run(operands: dict[str, jax.Array]) -> Any:
        def second(operands: dict[str, jax.Array]) -> jax.Array:
            return segments.keep(second_BT, packed(op, EDGES, implementation=implementation, **operands)[0])

        y, pull = jax.vjp(second, operands)
        return y, pull(jnp.cos(y))[0]

    (y, gradients), (same, _) = run(mine), run({key: mixed(key) for key in mine})
    np.testing.assert_array_equal(y, same)
    assert (np.asarray(y) != 0).any()
    for key, gradient in gradients.items():
        if key not in op.shared:
            first = gradient if key == op.state else segments.keep(~second_BT, gradient)
            assert not np.asarray(first).any(), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_attention-tied", "linear_attention-bonus", "delta_rule-gated", "ssd"])
def test_strong_decays_and_many_boundaries_stay_finite(implementation, name) -> None:
    operands = {key: 300.0 * x if key.startswith("log_") else x for key, x in draw(name).items()}
    lengths = ((1,) * T, (2,) * 18 + (1,))

    def loss(operands: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(jnp.square(packed(OPS[name], lengths, implementation=implementation, **operands)[0]))

    y = packed(OPS[name], lengths, implementation=implementation, **operands)[0]
    (want, _) = documents(OPS[name], lengths, **operands)
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-4 * float(jnp.abs(want).max()))
    for key, gradient in fast_jit(jax.grad(loss))(operands).items():
        assert np.isfinite(np.asarray(gradient)).all(), key


@each_op()
def test_one_document_changes_nothing(name) -> None:
    """A single document equals no segments, to rounding: an initial state and earlier inputs continue it."""
    operands, op = draw(name), OPS[name]
    want = op.call(**operands, implementation="xla")
    got = packed(op, ((T,), (T,)), implementation="xla", **operands)
    for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-5 * float(jnp.abs(w).max()))


@each_op()
def test_under_vmap_equals_a_loop(implementation, name) -> None:
    op, draws, tables = OPS[name], [draw(name, seed=seed) for seed in (0, 1)], (LENGTHS, EDGES)

    def run(operands: dict[str, jax.Array], segments_BT: jax.Array) -> Any:
        return op.call(**operands, segments=segments_BT, implementation=implementation)

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *draws)
    got = jax.vmap(run)(stacked, jnp.stack([numbered(lengths) for lengths in tables]))
    for i, (operands, lengths) in enumerate(zip(draws, tables, strict=True)):
        want = run(operands, numbered(lengths))
        jax.tree.map(lambda g, w, i=i: np.testing.assert_allclose(g[i], w, rtol=2e-5, atol=2e-5), got, want)


def test_places_in_documents() -> None:
    segments_BT = numbered(((2, 1, 4), (7,)))
    np.testing.assert_array_equal(segments.positions(segments_BT), [[0, 1, 0, 0, 1, 2, 3], range(7)])
    np.testing.assert_array_equal(segments.reach(segments_BT, 3), [[3, 3, 0, 0, 1, 2, 3], [3] * 7])
    np.testing.assert_array_equal(np.flatnonzero(segments.first_tokens(segments_BT)), [2, 3])


@each_op(*OPS)
def test_wrong_segments_are_refused(name) -> None:
    operands = draw(name)
    for wrong in (numbered()[:, 1:], numbered()[0], numbered().astype(jnp.float32)):
        with pytest.raises((ValueError, TypeError), match="segments"):
            OPS[name].call(**operands, segments=wrong)
