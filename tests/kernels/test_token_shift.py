"""RWKV's token shift: both backends against float64.

The tests cover values, all gradients, and the calls of the mixers.
"""

import re
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import backend
from kernels_pallas.token_shift import reference
from kernels_pallas.token_shift.triton import load, refusal
from kernels_pallas.triton import runtime
from seqjax import mixers, sharding
from seqjax.mixers._rwkv import lerps
from tests import extras, support
from tests.kernels.common import assert_close, fast_jit, mixer_gradients, outputs_and_gradients

shift = extras.triton_module("token_shift.triton.shift")

NAMES = ("x", "last", "mus", "moves")


class Case(NamedTuple):
    T: int
    D: int
    N: int
    moves: bool = False
    last: bool = True
    B: int = 2


# The interpreter's tiles have 4 x 8 positions and 16 channels. Cases: several tiles, whole and partial; a tile longer
# than the sequence; a piece that ends with the sequence, and a piece after it.
CASES = [
    Case(70, 20, 3),
    Case(37, 20, 5, moves=True),
    Case(1, 6, 1),
    Case(2, 21, 2, last=False),
    Case(64, 48, 4, moves=True, last=False),
    Case(8, 16, 6),
    Case(9, 96, 2, moves=True),
    Case(130, 9, 1, last=False),
]


def draw(case: Case, *, dtype="float32", seed=0) -> tuple[Any, ...]:
    """Draw x, last, mus and moves."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, last = normal(case.B, case.T, case.D), normal(case.B, case.D)
    mus = tuple(jnp.asarray(rng.uniform(size=case.D), jnp.float32) for _ in range(case.N))
    moves = normal(case.N, case.B, case.T, case.D) if case.moves else None
    return x, last if case.last else None, mus, moves


def both(arrays: Any, implementation: str) -> dict[str, np.ndarray]:
    """Return an implementation's results and gradients by name."""
    f, like = (partial(kp.token_shift, implementation=name) for name in (implementation, "xla"))
    return leaves(outputs_and_gradients(f, arrays, like=like, names=NAMES))


def wanted(arrays: Any) -> dict[str, np.ndarray]:
    """Return the same in float64, for the same rounded inputs and cotangents."""
    like = partial(kp.token_shift, implementation="xla")
    return leaves(outputs_and_gradients(reference.token_shift, arrays, wide=True, like=like, names=NAMES))


def leaves(results: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(results)}


wanted_of = cache(lambda case, dtype: wanted(draw(case, dtype=dtype)))  # shared by all implementations


def quick(n: int) -> list[Any]:
    """Return all cases; those after the first n are slow."""
    return support.slow_unless(lambda case: case in CASES[:n], [(case,) for case in CASES])


@pytest.mark.parametrize("case", quick(4), ids=str)
def test_equals_double_precision(implementation, case) -> None:
    got, want = both(draw(case), implementation), wanted_of(case, "float32")
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert_close(got[name], w, "float32", name, scale=1e-3)


# Largest errors in units of 2^-8, one bf16 rounding, relative to the largest entry. Triton rounds results once and sums
# the gradients of mus in float32. xla rounds mu, the difference, its product and the sum, the gradient of x after each
# of up to 2 N additions, and sums over tokens.
UNITS = {"triton": 1.01, "xla": 8.0}


@pytest.mark.parametrize("case", quick(1), ids=str)
def test_bf16_is_rounded_at_the_end(implementation, case) -> None:
    got, want = both(draw(case, dtype="bfloat16"), implementation), wanted_of(case, "bfloat16")
    for name, w in want.items():
        is_sum = "mus" in name
        assert got[name].dtype == (np.float32 if is_sum else jnp.bfloat16)
        units = np.abs(got[name].astype(np.float64) - w).max() / np.abs(w).max() * 2**8
        assert units <= (0.01 if implementation == "triton" and is_sum else UNITS[implementation]), name


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(130, 64, 6), Case(300, 192, 5, moves=True)], ids=str)
@pytest.mark.parametrize("implementation", ["triton"])
def test_with_the_tiles_of_a_gpu(monkeypatch, implementation, case) -> None:
    monkeypatch.setattr(shift, "tile", lambda kernel: shift.TILES[kernel])
    got, want = both(draw(case), implementation), wanted_of(case, "float32")
    for name, w in want.items():
        assert_close(got[name], w, "float32", name, scale=1e-3)


def test_is_causal_and_deterministic(implementation) -> None:
    x, *rest = draw(Case(50, 10, 2, moves=True), dtype="bfloat16")
    first, again = (both((x, *rest), implementation) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    changed = both((x.at[:, 29].multiply(2), *rest), implementation)
    for name in ("[0][0]", "[0][1]"):
        differs = (changed[name] != first[name]).any(axis=(0, 2))
        np.testing.assert_array_equal(differs, np.isin(np.arange(50), (29, 30)))


def test_earlier_inputs_continue_a_sequence(implementation) -> None:
    """A call continues another bitwise, as prefill and decoding do."""
    x, last, mus, moves = draw(Case(50, 20, 2, moves=True))
    f = fast_jit(partial(kp.token_shift, implementation=implementation))
    pieces = f(x[:, :20], last, mus, moves[:, :, :20]), f(x[:, 20:], x[:, 19], mus, moves[:, :, 20:])
    for n, y in enumerate(f(x, last, mus, moves)):
        np.testing.assert_array_equal(jnp.concatenate([piece[n] for piece in pieces], axis=1), y)


@pytest.mark.slow
def test_under_vmap_equals_a_loop(implementation) -> None:
    """Values and gradients, for mapped and for shared mus."""
    case = Case(19, 12, 2, moves=True)
    each = [draw(case, seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    f = partial(kp.token_shift, implementation=implementation)

    def run(*arrays):
        y, pull = jax.vjp(f, *arrays)
        return y, pull(jax.tree.map(jnp.cos, y))

    want = jax.tree.map(lambda *x: jnp.stack(x), *(fast_jit(run)(*arrays) for arrays in each))
    jax.tree.map(partial(assert_close, dtype="float32"), fast_jit(jax.vmap(run))(*stacked), want)
    x, last, _, moves = stacked
    got = fast_jit(jax.vmap(f, in_axes=(0, 0, None, 0)))(x, last, each[0][2], moves)
    want = [f(x[i], last[i], each[0][2], moves[i]) for i in range(2)]
    jax.tree.map(partial(assert_close, dtype="float32"), got, jax.tree.map(lambda *y: jnp.stack(y), *want))


def test_the_backward_pass_keeps_only_inputs(implementation) -> None:
    case = Case(64, 16, 3, last=False)
    x, last, mus, _ = draw(case)
    f = lambda x, mus: kp.token_shift(x, last, mus, implementation=implementation)  # noqa: E731
    pull = jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], x, mus)
    assert sum(kept.size >= x.size for kept in jax.tree.leaves(pull)) == 1


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        # With the tests' import hook, annotations reject a bad shape before the function does.
        ({"mus": ()}, "^mus .*empty"),
        ({"mus": (jnp.zeros(6), jnp.zeros(5))}, r"mus\[1\] must be \(6,\)|Type-check"),
        ({"last_BD": jnp.zeros((2, 5))}, r"last_BD must be \(2, 6\)|Type-check"),
        ({"moves_NBTD": jnp.zeros((2, 2, 9, 6))}, r"moves_NBTD must be \(1, 2, 9, 6\)"),
    ],
)
def test_mismatched_shapes_are_named(wrong, match) -> None:
    arguments: dict[str, Any] = {"x_BTD": jnp.zeros((2, 9, 6)), "last_BD": None, "mus": (jnp.zeros(6),)} | wrong
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=match):
        kp.token_shift(**arguments)


def problem(*, T=32, N=6, dtype="bfloat16", is_named=False) -> backend.Problem:
    x = jax.ShapeDtypeStruct((2, T, 768), jnp.dtype(dtype))
    return backend.Problem("gpu", (x,), {"branches": N}, is_named)


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(dtype="float32")) is None
    assert re.search("7 branches .* 6", str(refusal(problem(N=7))))
    assert re.search("1 positions .* 16", str(refusal(problem(T=1))))
    assert refusal(problem(T=1, is_named=True)) is None
    assert re.search("x is int8; .*bfloat16, float16, float32", str(refusal(problem(dtype="int8"))))


def test_double_precision_uses_xla() -> None:
    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda x: x.astype(jnp.float64), draw(CASES[1]))
        with pytest.raises(kp.BackendError, match=r"triton: (x is float64|Triton)"):
            kp.token_shift(*arrays, implementation="triton")
        for y, want in zip(kp.token_shift(*arrays), reference.token_shift(*arrays), strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-13)


def outside(monkeypatch, load) -> None:
    monkeypatch.setattr(backend, "_outside", {"token_shift": {"mine": kp.Backend("mine", load)}})


@pytest.mark.parametrize(("seq", "used"), [(1, "mine"), (2, "xla")])
def test_sequences_sharded_over_time_use_xla(monkeypatch, seq, used) -> None:
    from kernels_pallas.token_shift import xla

    if jax.device_count() < seq:
        pytest.skip("needs two devices")
    outside(monkeypatch, lambda: xla)
    mesh = sharding.make_mesh(seq=seq, devices=jax.devices()[:seq])
    with jax.set_mesh(mesh):
        jax.eval_shape(lambda x, mu: lerps(x, None, (mu,)), jnp.ones((2, 8, 6)), jnp.ones(6))
    assert kp.backends_used()["token_shift"] == used


MIXERS = {
    "rwkv7": partial(mixers.RWKV7, heads=2),
    "rwkv6": partial(mixers.RWKV6, head_dim=8),
    "rwkv5": partial(mixers.RWKV5, head_dim=8),
    "rwkv7_shell": partial(mixers.RWKV7Shell, heads=2, core="full"),
}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("implementation", ["triton"])
def test_mixer_gradients_match_xla(monkeypatch, implementation, name) -> None:
    gradients = mixer_gradients(MIXERS[name])
    want = gradients()
    assert kp.backends_used()["token_shift"] == "xla"
    outside(monkeypatch, load)
    got = gradients()
    assert kp.backends_used()["token_shift"] == "mine"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()), got, want)
