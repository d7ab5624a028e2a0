"""RWKV-7's recurrence operands: both backends against float64.

The tests cover values, all gradients, and the call of the mixer.
"""

import re
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import LowRank, ValueMix, backend
from kernels_pallas.triton import runtime
from kernels_pallas.wkv7_operands import reference
from kernels_pallas.wkv7_operands.interface import Vectors
from kernels_pallas.wkv7_operands.triton import load, refusal
from seqjax import mixers
from seqjax.nn.params import Template
from tests import extras, support
from tests.kernels.common import assert_close, fast_jit, outputs_and_gradients

operands = extras.triton_module("wkv7_operands.triton.operands")

NAMES = ("r", "k", "v", "decay", "eta", "vectors", "first", "share")


class Case(NamedTuple):
    """Sizes and the kind of value mixing.

    `mix` is "mixed" with first-layer values, "none" without, or "unused" in the first layer.
    """

    T: int
    H: int = 3
    K: int = 8
    mix: str = "mixed"
    ranks: tuple[int, int, int] = (5, 16, 3)
    B: int = 2


# The interpreter's tiles have up to 4 rows (tokens x heads), two tiles per program. Cases: partial tiles and several
# programs.
CASES = [
    Case(13),
    Case(1, H=2, mix="none"),
    Case(21, H=2, K=64, mix="unused"),
    Case(9, H=4, K=96),
    Case(8, H=1, K=16, mix="none", ranks=(1, 40, 1)),
    Case(70, H=6, K=20),
]


def draw(case: Case, *, dtype="float32", scale=1.0, seed=0) -> tuple[Any, ...]:
    """Draw operands in the order of NAMES.

    Data except the maps' hidden values has scale `scale`.
    """
    rng = np.random.default_rng(seed)
    B, T, H, K, D = case.B, case.T, case.H, case.K, case.H * case.K

    def data() -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=(B, T, H, K)), dtype)

    def wide(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def map_(rank: int) -> LowRank:
        hidden = jnp.asarray(rng.normal(size=(B, T, rank)), dtype)
        return LowRank(hidden, (wide(rank, D) * rank**-0.5).astype(dtype).astype("float32"), wide(D))

    decay, eta, share = (map_(rank) for rank in case.ranks)
    vectors = Vectors(1 + wide(D), wide(D), wide(D))
    values = (None, None) if case.mix == "none" else (data(), share)
    return data(), data(), data(), decay, eta, vectors, *values


def op(case: Case, *arrays, implementation=None) -> Any:
    r, k, v, decay, eta, vectors, first, share = arrays
    mix = None if first is None else ValueMix(first, share, jnp.asarray(case.mix == "unused"))
    if implementation == "reference":
        return reference.wkv7_operands(r, k, v, decay, eta, vectors, mix)
    parameters = {f"{name}_D": x for name, x in zip(("k_k", "k_a", "r_k"), vectors, strict=True)}
    return kp.wkv7_operands(r, k, v, decay=decay, eta=eta, **parameters, mix=mix, implementation=implementation)


def both(case: Case, arrays: Any, implementation: str) -> dict[str, np.ndarray]:
    """Return results and gradients by name.

    The reference uses float64 and the same rounded operands.
    """
    f, like = (partial(op, case, implementation=name) for name in (implementation, "xla"))
    wide = implementation == "reference"
    return leaves(outputs_and_gradients(f, arrays, wide=wide, like=like, names=NAMES))


def leaves(results: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(results)}


wanted = cache(lambda case, dtype="float32", scale=1.0: both(case, draw(case, dtype=dtype, scale=scale), "reference"))


def quick(n: int) -> list[Any]:
    """Return all cases; those after the first n are slow."""
    return support.slow_unless(lambda case: case in CASES[:n], [(case,) for case in CASES])


def assert_right(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Compare in float32, at the scale of each array."""
    assert got.keys() == want.keys()
    for name, w in want.items():
        size = np.abs(w).max() or 1.0
        assert got[name].dtype == np.float32
        assert_close(got[name] / size, w / size, "float32", name)


@pytest.mark.parametrize("case", quick(3), ids=str)
def test_equals_double_precision(implementation, case) -> None:
    assert_right(both(case, draw(case), implementation), wanted(case))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("case", [CASES[0]], ids=str)
def test_extreme_data_scales(implementation, case, scale) -> None:
    """Head norms and gradients scale with the data; the bonus scales with its square."""
    assert_right(both(case, draw(case, scale=scale), implementation), wanted(case, scale=scale))


@pytest.mark.parametrize("size", [60.0, 1e4])
def test_saturated_sigmoids(implementation, size) -> None:
    """Biases of both signs saturate the sigmoids.

    Results and vanishing gradients are finite and right.
    """
    case = CASES[0]
    r, k, v, decay, eta, vectors, first, share = draw(case)
    sign = jnp.where(jnp.arange(case.H * case.K) % 2 == 0, size, -size)
    decay, eta, share = (map_._replace(bias_D=sign) for map_ in (decay, eta, share))
    arrays = (r, k, v, decay, eta, vectors, first, share)
    got, want = both(case, arrays, implementation), both(case, arrays, "reference")
    for name, w in want.items():
        # e^-60 is below float32 precision in 1 - sigmoid
        assert_close(got[name], w, "float32", name, scale=1.0)


# Largest errors in units of 2^-8, one bf16 rounding, relative to the largest entry; observed: 1.08 (triton) and 1.43
# (xla). Both round results once. xla also rounds the gradients of r and k after each of their two uses. Triton rounds
# the maps' products: for values up to 4 by half a unit of 2^-6, of which the sigmoid's slope passes on a quarter.
UNITS = {"triton": 1.5, "xla": 2.0}


@pytest.mark.parametrize("case", quick(1), ids=str)
def test_bf16_is_rounded_at_the_end(implementation, case) -> None:
    arrays = draw(case, dtype="bfloat16")
    got, want = both(case, arrays, implementation), wanted(case, dtype="bfloat16")
    given = {f"[1]['{name}']": x for name, x in zip(NAMES, arrays, strict=True)}
    for name, w in want.items():
        units = np.abs(got[name].astype(np.float64) - w).max() / np.abs(w).max() * 2**8 if w.any() else 0.0
        assert units <= UNITS[implementation], (name, units)
    dtypes = {jax.tree_util.keystr(path): x.dtype for path, x in jax.tree_util.tree_leaves_with_path(given)}
    assert sorted(str(x) for x in dtypes.values()) == sorted(
        str(x.dtype) for n, x in got.items() if n.startswith("[1]")
    )
    assert got["[0].log_w_BTHK"].dtype == got["[0].skip[1]"].dtype == np.float32


def test_heads_and_tokens_of_zeros(implementation) -> None:
    """A zero key has the gradient of k / 1e-12; neighbouring keys are unaffected."""
    case = CASES[0]
    r, k, *rest = draw(case)
    k = k.at[0, 3:5].set(0).at[1, 2, 1].set(0)
    arrays = (r, k, *rest)
    got, want = both(case, arrays, implementation), both(case, arrays, "reference")
    is_zero = ~np.asarray(k).any(-1)
    dk = "[1]['k']"
    for part in (is_zero, ~is_zero):
        size = np.abs(want[dk][part]).max()
        assert_close(got[dk][part] / size, want[dk][part] / size, "float32", dk)
    assert_right(*({name: x for name, x in results.items() if name != dk} for results in (got, want)))


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(300, 12, 64, B=1), Case(70, 6, 96), Case(33, 3, 24, "none")], ids=str)
@pytest.mark.parametrize("implementation", ["triton"])
def test_with_the_tiles_of_a_gpu(monkeypatch, implementation, case) -> None:
    monkeypatch.setattr(operands, "interpreter", SimpleNamespace(is_chosen=lambda: False))
    assert_right(both(case, draw(case), implementation), wanted(case))


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("implementation", ["triton"])
def test_loading_ahead_changes_no_bit(monkeypatch, implementation, stages) -> None:
    """Loads ahead changed results in a delta-rule kernel (Triton 3.6 on an H200)."""
    case = Case(300, 12, 64)
    arrays = draw(case, dtype="bfloat16")
    want = both(case, arrays, implementation)
    tiles = {key: tile._replace(stages=stages) for key, tile in operands.TILES.items()}
    monkeypatch.setattr(operands, "TILES", tiles)
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, both(case, arrays, implementation), want)


def test_tokens_are_independent(implementation) -> None:
    """A changed token leaves results and gradients at other tokens bitwise equal."""
    case = Case(11)
    arrays = draw(case)
    others = np.arange(11) != 6
    change = lambda x: x.at[:, 6].multiply(-3) if x.ndim > 2 else x  # noqa: E731

    def seen(arrays: Any) -> list[np.ndarray]:
        results = both(case, arrays, implementation).values()
        return [x[:, others] for x in results if x.ndim > 2]

    jax.tree.map(np.testing.assert_array_equal, seen(jax.tree.map(change, arrays)), seen(arrays))


def test_the_first_layer_keeps_its_values(implementation) -> None:
    """The values are bitwise equal.

    The first-layer values and their map get no gradient.
    """
    case = CASES[2]
    arrays = draw(case, dtype="bfloat16")
    got = both(case, arrays, implementation)
    np.testing.assert_array_equal(got["[0].v_BTHK"], arrays[2])
    assert not any(np.asarray(x, np.float32).any() for name, x in got.items() if "share" in name)


@pytest.mark.slow
def test_under_vmap_equals_a_loop(implementation) -> None:
    """Values and gradients, for mapped and for shared parameters."""
    case = Case(5, H=2)
    each = [draw(case, seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)

    def run(*arrays):
        out, pull = jax.vjp(partial(op, case, implementation=implementation), *arrays)
        return out, pull(jax.tree.map(jnp.cos, out))

    want = jax.tree.map(lambda *x: jnp.stack(x), *(fast_jit(run)(*arrays) for arrays in each))
    jax.tree.map(partial(assert_close, dtype="float32"), fast_jit(jax.vmap(run))(*stacked), want)
    shared = fast_jit(jax.vmap(run, in_axes=(0, 0, 0, 0, 0, None, 0, 0)))(*(*stacked[:5], each[0][5], *stacked[6:]))
    want = jax.tree.map(lambda *x: jnp.stack(x), *(run(*x[:5], each[0][5], *x[6:]) for x in each))
    jax.tree.map(partial(assert_close, dtype="float32"), shared, want)


@pytest.mark.parametrize("case", [Case(64, K=16), Case(64, K=16, mix="none")], ids=str)
def test_the_backward_pass_keeps_only_inputs(implementation, case) -> None:
    """Triton also keeps the maps' products, in the input dtype."""
    arrays = draw(case, dtype="bfloat16")
    pull = jax.eval_shape(lambda *a: jax.vjp(partial(op, case, implementation=implementation), *a)[1], *arrays)
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull) if x.size >= arrays[0].size)
    n_maps = 2 + (case.mix == "mixed")
    n_data = 2 + 2 * (case.mix == "mixed")
    assert kept == 2 * arrays[0].size * (n_data + (n_maps if implementation == "triton" else 0))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        # With the tests' import hook, annotations reject a bad shape before the function does.
        ({"k_k_D": jnp.zeros(5)}, r"k_k_D must be \(16,\)|Type-check"),
        ({"k_BTHK": jnp.zeros((1, 3, 4, 4))}, r"k_BTHK must be \(1, 3, 2, 8\)|Type-check"),
        ({"decay": LowRank(jnp.zeros((1, 3, 5)), jnp.zeros((4, 16)), jnp.zeros(16))}, r"decay.hidden_BTR must be"),
    ],
)
def test_mismatched_shapes_are_named(wrong, match) -> None:
    arrays = draw(Case(3, H=2, mix="none", B=1))
    parameters = dict(zip(("k_k_D", "k_a_D", "r_k_D"), arrays[5], strict=True))
    given = {"r_BTHK": arrays[0], "k_BTHK": arrays[1], "v_BTHK": arrays[2], "decay": arrays[3], "eta": arrays[4]}
    with pytest.raises(Exception, match=match):
        kp.wkv7_operands(**given | parameters | wrong)


def problem(*, dtypes=("bfloat16", "bfloat16"), T=64, K=64, is_named=False) -> backend.Problem:
    shapes = tuple(jax.ShapeDtypeStruct((2, T, 12, K), jnp.dtype(dtype)) for dtype in dtypes)
    return backend.Problem("gpu", shapes, {}, is_named)


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(dtypes=("float32",), K=384)) is None
    assert re.search("1025 channels .* 1024", str(refusal(problem(K=1025))))
    assert re.search("1 positions .* 16", str(refusal(problem(T=1))))
    assert refusal(problem(T=1, is_named=True)) is None
    assert re.search("bfloat16 and float32; .*dtype", str(refusal(problem(dtypes=("bfloat16", "float32")))))


def test_double_precision_uses_xla() -> None:
    case = Case(5)
    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda x: x.astype(jnp.float64), draw(case))
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton)"):
            op(case, *arrays, implementation="triton")
        got, want = op(case, *arrays), op(case, *arrays, implementation="reference")
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13), got, want)


def outside(monkeypatch, load) -> None:
    monkeypatch.setattr(backend, "_outside", {"wkv7_operands": {"mine": kp.Backend("mine", load)}})


@pytest.mark.parametrize("layer", [None, 0, 2])
@pytest.mark.parametrize("implementation", ["triton"])
def test_mixer_gradients_match_xla(monkeypatch, implementation, layer) -> None:
    """Standalone, in a first and in a later layer.

    Layer indices are traced, as in a scan over layers.
    """
    template = Template(lambda rngs, _: mixers.RWKV7(16, heads=2, rngs=rngs))
    wave = lambda p: 0.1 * jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape)  # noqa: E731
    params = jax.tree.map(lambda p: p + wave(p), template.init(jax.random.key(0)))
    x, first = (jnp.asarray(np.random.default_rng(seed).normal(size=(2, 11, 16)), jnp.float32) for seed in range(2))

    def gradients() -> Any:
        def loss(params, x, first, layer):
            more = {} if layer is None else {"v_first_BTD": first, "layer": layer}
            y, first, _ = template.bind(params).time_mix(x, None, **more)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(first))

        return fast_jit(jax.value_and_grad(loss, (0, 1, 2)))(params, x, first, layer)

    want = gradients()
    assert kp.backends_used()["wkv7_operands"] == "xla"
    outside(monkeypatch, load)
    got = gradients()
    assert kp.backends_used()["wkv7_operands"] == "mine"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()), got, want)
