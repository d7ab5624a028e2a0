"""Mamba-3's recurrence operands: both backends against float64.

The tests cover values, all gradients, and the call of the mixer.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import backend
from kernels_pallas.mamba3_operands import reference
from kernels_pallas.mamba3_operands.triton import load, refusal
from kernels_pallas.triton import runtime
from seqjax import mixers
from seqjax.nn.params import Template
from tests import extras, support
from tests.kernels.common import assert_close, fast_jit, outputs_and_gradients

operands = extras.triton_module("mamba3_operands.triton.operands")

NAMES = ("b", "c", "turn", "dt", "b_bias", "c_bias", "before", "start")


class Case(NamedTuple):
    """Sizes: tokens, heads, channels, rotated pairs, and the size of the steps."""

    T: int
    H: int = 3
    N: int = 8
    R: int = 2
    step: float = 0.3
    B: int = 2


# The interpreter's chunks have 8 tokens, its forward programs 2 heads, and sums take 4 chunks at once. Cases: partial
# chunks, one token, all channels rotated, odd sizes, many turns per token, and many chunks.
CASES = [
    Case(13),
    Case(1, H=1),
    Case(9, H=2, N=6, R=3),
    Case(21, H=2, N=11, R=3, step=30.0),
    Case(70, H=5, N=20, R=1, step=1e-4, B=1),
    Case(16, N=16, R=4),
]


def draw(case: Case, *, dtype="float32", seed=0) -> tuple[jax.Array, ...]:
    """Draw operands in the order of NAMES."""
    rng = np.random.default_rng(seed)
    B, T, H, N, R = case.B, case.T, case.H, case.N, case.R
    shapes = ((B, T, N), (B, T, N), (B, T, R), (B, T, H), (H, N), (H, N), (B, N), (B, H, R))
    b, c, turn, dt, b_bias, c_bias, before, start = (rng.normal(size=shape) for shape in shapes)
    wide = (np.tanh(turn) / 2, case.step * np.exp(dt), 1 + b_bias, 1 + c_bias, start % 1)
    turn, dt, b_bias, c_bias, start = (jnp.asarray(x, jnp.float32) for x in wide)
    b, c, before = (jnp.asarray(x, dtype) for x in (b, c, before))
    return b, c, turn, dt, b_bias, c_bias, before, start


def op(*arrays: Any, implementation: str | None = None) -> Any:
    """Return the operands, with the last angles as a cosine and a sine: they are defined modulo 1."""
    b, c, turn, dt, b_bias, c_bias, before, start = arrays
    if implementation == "reference":
        made = reference.mamba3_operands(*arrays)
    else:
        options: Any = {"b_bias_HN": b_bias, "c_bias_HN": c_bias, "before_BN": before, "start_BHR": start}
        made = kp.mamba3_operands(b, c, turn, dt, **options, implementation=implementation)
    angles = 2 * jnp.pi * made.turns_BHR
    return {"k": made.k_BTHN, "q": made.q_BTHN, "own": made.own_BTH, "cos": jnp.cos(angles), "sin": jnp.sin(angles)}


def both(arrays: Any, implementation: str) -> dict[str, np.ndarray]:
    """Return results and gradients by name.

    The reference uses float64 and the same rounded operands.
    """
    f, like = (partial(op, implementation=name) for name in (implementation, "xla"))
    made = outputs_and_gradients(f, arrays, wide=implementation == "reference", like=like, names=NAMES)
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(made)}


wanted = cache(lambda case, dtype="float32": both(draw(case, dtype=dtype), "reference"))


def assert_right(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: str, slack: float = 1.0) -> None:
    """Compare at the scale of each array, within `slack` times the tolerance of a dtype."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        size = slack * (np.abs(w).max() or 1.0)
        assert_close(np.asarray(got[name], np.float64) / size, w / size, tolerance, name)


@pytest.mark.parametrize(
    "case", support.slow_unless(lambda case: case in CASES[:3], [(case,) for case in CASES]), ids=str
)
def test_equals_double_precision(implementation, case) -> None:
    """With many turns per token, rounding a step of 100 turns leaves an error of 1e-5 turns."""
    slack = max(1.0, case.step)
    assert_right(both(draw(case), implementation), wanted(case), "float32", slack)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bit_inputs_round_results_once(implementation, dtype) -> None:
    """Keys, queries and gradients of B, C and `before` are rounded; the rest is float32."""
    case = CASES[0]
    got, want = both(draw(case, dtype=dtype), implementation), wanted(case, dtype)
    for name, w in want.items():
        is_16_bit = any(f"['{key}']" in name for key in ("k", "q", "b", "c", "before"))
        assert got[name].dtype == (dtype if is_16_bit else jnp.float32), name
        size = np.abs(w).max()
        assert_close(np.asarray(got[name], np.float64) / size, w / size, dtype if is_16_bit else "float32", name)


def test_is_causal_and_deterministic(implementation) -> None:
    arrays = draw(CASES[0])
    run = fast_jit(partial(op, implementation=implementation))
    first, again = run(*arrays), run(*arrays)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    changed = run(*(x.at[:, 9:].multiply(2) for x in arrays[:4]), *arrays[4:])
    for name in ("k", "q", "own"):
        np.testing.assert_array_equal(changed[name][:, :9], first[name][:, :9])
        assert not np.array_equal(changed[name][:, 10:], first[name][:, 10:])


@pytest.mark.slow
def test_under_vmap_equals_a_loop(implementation) -> None:
    """Values and gradients, for mapped and for shared biases."""
    each = [draw(Case(5, H=2), seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)

    def run(*arrays):
        out, pull = jax.vjp(partial(op, implementation=implementation), *arrays)
        return out, pull(jax.tree.map(jnp.cos, out))

    want = jax.tree.map(lambda *x: jnp.stack(x), *(fast_jit(run)(*arrays) for arrays in each))
    jax.tree.map(partial(assert_close, dtype="float32"), fast_jit(jax.vmap(run))(*stacked), want)
    shared = fast_jit(jax.vmap(run, in_axes=(0, 0, 0, 0, None, None, 0, 0)))(*stacked[:4], *each[0][4:6], *stacked[6:])
    want = jax.tree.map(lambda *x: jnp.stack(x), *(fast_jit(run)(*x[:4], *each[0][4:6], *x[6:]) for x in each))
    jax.tree.map(partial(assert_close, dtype="float32"), shared, want)


def test_the_backward_pass_keeps_only_inputs() -> None:
    """Keys and queries are not kept, and no float32 array is as large as they are."""
    arrays = draw(Case(64, N=16, R=4), dtype="bfloat16")
    f = partial(op, implementation="triton")
    pull = jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *arrays)
    assert max(x.size for x in jax.tree.leaves(pull)) <= arrays[0].size
    gradients = (jax.ShapeDtypeStruct((2, 64, 3, 16), jnp.bfloat16),) * 2
    rest = jax.ShapeDtypeStruct((2, 64, 3), jnp.float32), arrays[7]
    biases = jnp.stack([jnp.stack(arrays[4:6])] * 2)
    inputs = (*arrays[:4], biases, *arrays[6:])
    program = jax.make_jaxpr(operands._run_backward)(*inputs, *gradients, *rest)
    made = [var.aval for eqn in program.eqns for var in eqn.outvars if eqn.primitive.name == "pure_callback"]
    assert made
    assert max(x.size for x in made) <= 2 * arrays[0].size


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        # With the tests' import hook, annotations reject a bad shape before the function does.
        ({"b_bias_HN": jnp.zeros((3, 7))}, r"b_bias_HN must be \(3, 8\)|Type-check"),
        ({"start_BHR": jnp.zeros((2, 3, 1))}, r"start_BHR must be \(2, 3, 2\)|Type-check"),
        ({"turn_BTR": jnp.zeros((2, 13, 5)), "start_BHR": jnp.zeros((2, 3, 5))}, "has 5 channel pairs; 8 channels"),
    ],
)
def test_mismatched_shapes_are_named(wrong, match) -> None:
    names = ("b_BTN", "c_BTN", "turn_BTR", "dt_BTH", "b_bias_HN", "c_bias_HN", "before_BN", "start_BHR")
    given = dict(zip(names, draw(CASES[0]), strict=True)) | wrong
    positional = [given.pop(name) for name in names[:4]]
    with pytest.raises(Exception, match=match):
        kp.mamba3_operands(*positional, **given)


def problem(*, dtypes=("bfloat16", "bfloat16"), T=64, N=128, is_named=False) -> backend.Problem:
    data = tuple(jax.ShapeDtypeStruct((2, T, N), jnp.dtype(dtype)) for dtype in dtypes)
    wide = tuple(jax.ShapeDtypeStruct((2, T, n), jnp.dtype("float32")) for n in (N // 4, 24))
    return backend.Problem("gpu", (*data, *wide), {}, is_named)


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(dtypes=("float32", "float32"))) is None
    assert "257 channels are more than 256" in str(refusal(problem(N=257)))
    assert "1 positions are less than 16" in str(refusal(problem(T=1)))
    assert refusal(problem(T=1, is_named=True)) is None
    assert "operands are bfloat16 and float32; it takes one dtype" in str(
        refusal(problem(dtypes=("bfloat16", "float32")))
    )


def test_double_precision_uses_xla() -> None:
    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda x: x.astype(jnp.float64), draw(Case(5)))
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton kernels need|Triton's)"):
            op(*arrays, implementation="triton")
        got, want = op(*arrays), op(*arrays, implementation="reference")
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), got, want)


@pytest.mark.parametrize("implementation", ["triton"])
def test_mixer_gradients_match_xla(monkeypatch, implementation) -> None:
    """Outputs, gradients and the last cache, after a prefix."""
    template = Template(lambda rngs, _: mixers.Mamba3(8, head_dim=4, state=8, chunk_size=4, rngs=rngs))
    params = template.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11, 8)), jnp.float32)

    def results() -> Any:
        def loss(params, x):
            mixer = template.bind(params)
            _, cache = mixer.prefill(x[:, :3], mixer.init_cache(2, 11, jnp.float32))
            y, cache = mixer.prefill(x[:, 3:], cache)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(2 * jnp.pi * cache.turns_BHR)), y

        return fast_jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

    want = results()
    assert kp.backends_used()["mamba3_operands"] == "xla"
    monkeypatch.setattr(backend, "_outside", {"mamba3_operands": {"mine": kp.Backend("mine", load)}})
    got = results()
    assert kp.backends_used()["mamba3_operands"] == "mine"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * np.abs(b).max()), got, want)
