"""The short convolution: both backends against float64, values and all gradients."""

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
from kernels_pallas.short_conv import reference
from kernels_pallas.short_conv.triton import refusal
from kernels_pallas.triton import runtime
from tests import extras, support
from tests.kernels.common import assert_close, fast_jit, outputs_and_gradients

conv = extras.triton_module("short_conv.triton.conv")

NAMES = ("x", "w", "b", "last")


class Case(NamedTuple):
    T: int
    E: int
    W: int = 4
    heads: int | None = None
    silu: bool = True
    bias: bool = True
    last: bool = True
    B: int = 2

    @property
    def options(self) -> dict[str, Any]:
        return {"silu": self.silu, "l2_heads": self.heads, "scale": 0.3 if self.heads else 1.0}


# The interpreter's tiles have 4 x 8 positions and 16 channels. Cases: several tiles, whole and partial; a tile longer
# than the sequence; sequences shorter than the filter; heads that fill a block or not; each part of the operation
# separately.
CASES = [
    Case(70, 20, heads=2),
    Case(37, 20),
    Case(1, 6),
    Case(2, 21, heads=3),
    Case(2, 5, last=False),
    Case(5, 96, heads=1, bias=False, last=False),
    Case(70, 48, W=3, silu=False),
    Case(130, 9, W=3, heads=3, silu=False, bias=False),
    Case(130, 32, W=1, last=False),
    Case(5, 20, W=1, heads=4),
    Case(64, 17, W=8, bias=False),
]


def draw(case: Case, *, dtype="float32", scale=1.0, seed=0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x, w, b, last = (
        rng.normal(size=shape)
        for shape in ((case.B, case.T, case.E), (case.E, case.W), (case.E,), (case.B, case.W - 1, case.E))
    )
    return (
        jnp.asarray(scale * x, dtype),
        jnp.asarray(w, jnp.float32),
        jnp.asarray(scale * b, jnp.float32) if case.bias else None,
        jnp.asarray(scale * last, dtype) if case.last else None,
    )


def op(*arrays, case: Case, implementation=None):
    return kp.short_conv(*arrays, **case.options, implementation=implementation)


def both(case: Case, arrays: Any, implementation: str) -> Any:
    """Return y and {name: gradient} for an implementation."""
    f = partial(op, case=case, implementation=implementation)
    return outputs_and_gradients(f, arrays, like=partial(op, case=case, implementation="xla"), names=NAMES)


def wanted(case: Case, arrays: Any) -> Any:
    """Return the same in float64, for the same rounded inputs and cotangent."""
    like = partial(op, case=case, implementation="xla")
    f = partial(reference.short_conv, **case.options)
    return outputs_and_gradients(f, arrays, wide=True, like=like, names=NAMES)


wanted_of = cache(lambda case, dtype: wanted(case, draw(case, dtype=dtype)))  # shared by all implementations


def quick(n: int) -> list[Any]:
    """Return all cases; those after the first n are slow."""
    return support.slow_unless(lambda case: case in CASES[:n], [(case,) for case in CASES])


def leaves(results: Any) -> dict[str, np.ndarray]:
    y, gradients = results
    return {"y": y} | {name: g for name, g in gradients.items() if g is not None and g.size}


@pytest.mark.parametrize("case", quick(4), ids=str)
def test_equals_double_precision(implementation, case) -> None:
    got, want = leaves(both(case, draw(case), implementation)), leaves(wanted_of(case, "float32"))
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert_close(got[name], w, "float32", name, scale=1e-3)


# Largest errors in units of 2^-8, one bf16 rounding, relative to the largest entry. Triton rounds only y, dx and the
# gradient of `last`, and sums other gradients in float32. xla rounds four times: s before the norm, the gradients of s
# and z, and each result. Errors of neighbouring positions average out in the sum over taps.
UNITS = {"triton": 1.01, "xla": 4.0}


@pytest.mark.parametrize("case", quick(2), ids=str)
def test_bf16_is_rounded_at_the_end(implementation, case) -> None:
    arrays = draw(case, dtype="bfloat16")
    got, want = leaves(both(case, arrays, implementation)), leaves(wanted_of(case, "bfloat16"))
    for name, w in want.items():
        assert got[name].dtype == (np.float32 if name in ("w", "b") else jnp.bfloat16)
        units = np.abs(got[name].astype(np.float64) - w).max() / np.abs(w).max() * 2**8
        assert units <= (0.01 if implementation == "triton" and name in ("w", "b") else UNITS[implementation]), name


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(130, 64), *(Case(70, 2 * K, heads=2, bias=False) for K in (64, 96, 128, 192))])
@pytest.mark.parametrize("implementation", ["triton"])
def test_with_the_tiles_of_a_gpu(monkeypatch, implementation, case) -> None:
    monkeypatch.setattr(conv, "tile", lambda kernel: conv.TILES[kernel])
    got, want = leaves(both(case, draw(case), implementation)), leaves(wanted_of(case, "float32"))
    for name, w in want.items():
        assert_close(got[name], w, "float32", name, scale=1e-3)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("case", [Case(9, 6), Case(9, 6, heads=2)], ids=str)
def test_extreme_input_scales(implementation, case, scale) -> None:
    """Sigmoids saturate and their exponentials overflow; squares are as small as eps."""
    arrays = draw(case, scale=scale)
    got, want = leaves(both(case, arrays, implementation)), leaves(wanted(case, arrays))
    for name, w in want.items():
        assert_close(got[name], w, "float32", name, scale=np.abs(w).max())


def test_zeros_under_the_norm_have_a_gradient(implementation) -> None:
    case = Case(9, 6, heads=2, bias=False, last=False)
    arrays = (jnp.zeros((2, 9, 6)), *draw(case)[1:])
    got, want = leaves(both(case, arrays, implementation)), leaves(wanted(case, arrays))
    assert not got["y"].any()
    assert want["x"].any()
    for name, w in want.items():
        assert_close(got[name], w, "float32", name)


def test_is_causal_and_deterministic(implementation) -> None:
    case = Case(50, 10, heads=2)
    x, *rest = draw(case, dtype="bfloat16")
    first, again = (both(case, (x, *rest), implementation) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    changed, _ = both(case, (x.at[:, 29:].multiply(2), *rest), implementation)
    np.testing.assert_array_equal(changed[:, :29], first[0][:, :29])
    assert (changed[:, 29:] != first[0][:, 29:]).any(axis=2).all()


def test_earlier_inputs_continue_a_sequence(implementation) -> None:
    """A call continues another bitwise, as prefill and decoding do."""
    case = Case(50, 20)
    x, w, b, last = draw(case)
    f = fast_jit(partial(op, case=case, implementation=implementation))
    pieces = f(x[:, :20], w, b, last), f(x[:, 20:], w, b, x[:, 17:20])
    np.testing.assert_array_equal(jnp.concatenate(pieces, axis=1), f(x, w, b, last))


@pytest.mark.slow
def test_under_vmap_equals_a_loop(implementation) -> None:
    """Values and gradients, for mapped and for shared taps and bias."""
    case = Case(19, 12, heads=3)
    each = [draw(case, seed=seed) for seed in range(2)]
    stacked = [jnp.stack(x) for x in zip(*each, strict=True)]
    f = partial(op, case=case, implementation=implementation)
    run = lambda *arrays: jax.vjp(f, *arrays)[1](jnp.cos(jnp.arange(2 * 19 * 12.0)).reshape(2, 19, 12))  # noqa: E731
    want = [fast_jit(run)(*arrays) for arrays in each]
    got = fast_jit(jax.vmap(run))(*stacked)
    for g, *w in zip(got, *want, strict=True):
        assert_close(g, jnp.stack(w), "float32")
    x, w, b, last = stacked
    got = fast_jit(jax.vmap(f, in_axes=(0, None, None, 0)))(x, w[0], b[0], last)
    assert_close(got, jnp.stack([f(x[i], w[0], b[0], last[i]) for i in range(2)]), "float32")


@pytest.mark.parametrize("implementation", ["triton"])
def test_the_backward_pass_keeps_only_inputs(implementation) -> None:
    case = Case(64, 16, heads=2, bias=False, last=False)
    f = partial(op, case=case, implementation=implementation)
    pull = jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *draw(case)[:2])
    sizes = [x.size for x in jax.tree.leaves(pull)]
    assert sum(size >= 2 * 64 * 16 for size in sizes) == 1


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        # With the tests' import hook, annotations reject a bad shape before the function does.
        ({"w_EW": jnp.zeros((5, 4))}, r"w_EW must be \(6, 4\)|Type-check"),
        ({"b_E": jnp.zeros(5)}, r"b_E must be \(6,\)|Type-check"),
        ({"last_BWE": jnp.zeros((2, 4, 6))}, r"last_BWE must be \(2, 3, 6\)"),
        ({"l2_heads": 4}, "4 heads .* 6 channels"),
        ({"l2_heads": 0}, "0 heads "),
        ({"scale": 0.5}, "set l2_heads"),
    ],
)
def test_mismatched_shapes_are_named(wrong, match) -> None:
    arguments: dict[str, Any] = {"x_BTE": jnp.zeros((2, 9, 6)), "w_EW": jnp.zeros((6, 4)), "silu": True} | wrong
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match=match):
        kp.short_conv(**arguments)


def problem(*, T=32, E=576, W=4, heads=None, dtype="bfloat16", taps="float32", is_named=False) -> backend.Problem:
    operands = tuple(jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in (((2, T, E), dtype), ((E, W), taps)))
    return backend.Problem("gpu", operands, {"silu": True, "l2_heads": heads}, is_named)


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(heads=6, dtype="float32", W=8)) is None
    assert re.search("9 taps .* 8", str(refusal(problem(W=9))))
    assert re.search("heads of 576 .* 256", str(refusal(problem(heads=1))))
    assert re.search("1 positions .* 16", str(refusal(problem(T=1))))
    assert refusal(problem(T=1, is_named=True)) is None
    assert "are float32 and int8" in str(refusal(problem(dtype="int8")))
    assert "and bias float32" in str(refusal(problem(taps="bfloat16")))


def test_double_precision_uses_xla() -> None:
    case = CASES[0]
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in draw(case)]
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton)"):
            op(*arrays, case=case, implementation="triton")
        got = op(*arrays, case=case)
        np.testing.assert_allclose(got, reference.short_conv(*arrays, **case.options), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (Case(2048, 576, heads=6), (96, 128, 4, 4)),
        (Case(2048, 1152), (128, 128, 4, 4)),
        (Case(2048, 576), (64, 64, 8, 4)),  # nine whole blocks
        (Case(2048, 384, heads=2), (192, 256, 2, 4)),
        (Case(20, 1152), (128, 128, 2, 2)),  # only two pieces of 16 positions exist
        (Case(16, 5), (16, 16, 1, 1)),
    ],
    ids=str,
)
def test_blocks_and_pieces_follow_the_shape(monkeypatch: pytest.MonkeyPatch, case, sizes) -> None:
    monkeypatch.setattr(conv.interpreter, "is_chosen", lambda: False)
    seen = []

    def launch(kernel, x, *arrays, out_shape, num_warps, **options):
        seen.append((*(options[name] for name in ("K", "KP", "R")), num_warps))
        return tuple(jnp.zeros(t.shape, t.dtype) for t in out_shape)

    monkeypatch.setattr(runtime, "launch", launch)
    run = partial(conv.run, **(case.options | {"eps": 1e-6}))
    jax.eval_shape(run, *draw(case._replace(B=1)))
    assert seen == [sizes]
