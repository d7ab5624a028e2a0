"""The norm per head with its gate: both backends against double precision.

Gradients are compared as well, with the options of each mixer.
"""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels_pallas as kp
from kernels_pallas import backend
from kernels_pallas.head_norm import reference
from kernels_pallas.head_norm.interface import Call
from kernels_pallas.head_norm.triton import load, refusal
from kernels_pallas.triton import limits, runtime
from seqjax import mixers, sharding
from seqjax.ops import head_norm
from tests import extras, support
from tests.kernels.common import fast_jit, mixer_gradients

norm = extras.triton_module("head_norm.triton.norm")

EPS = 2.0**-24  # half an ulp of float32 at 1
# Rounding error per dtype: relative, and absolute for subnormal numbers.
ROUNDING = {"float32": (0.0, 0.0), "bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25)}


class Kind(NamedTuple):
    """A mixer's options for the op; `skip` is the shape of the factors."""

    activation: str | None = None  # for the gate
    skip: str = ""
    is_shared: bool = True
    has_bias: bool = False
    gate_first: bool = False
    with_input: bool = False


KINDS = {
    "rwkv7": Kind("none", skip="B T H", is_shared=False, has_bias=True),
    "mamba2": Kind("silu", skip="H", is_shared=False, gate_first=True),
    "gated_deltanet": Kind("silu"),
    "rwkv6": Kind("silu", is_shared=False, has_bias=True),
    "kda": Kind("sigmoid"),
    "deltanet": Kind(),
    "rwkv7_shell": Kind(is_shared=False, has_bias=True),
    # Norms in a block, next to the residual stream: a single norm covers all channels.
    "rmsnorm": Kind(is_shared=False, gate_first=True, with_input=True),
    "layernorm": Kind(is_shared=False, has_bias=True, gate_first=True, with_input=True),
}


def options(kind: Kind, eps: float = 1e-5) -> dict[str, Any]:
    common = {"activation": kind.activation or "silu", "gate_first": kind.gate_first, "eps": eps}
    return common | ({"with_input": True} if kind.with_input else {})


def draw(kind: Kind, B=2, T=5, H=6, V=24, *, dtype="float32", scale=1.0, seed=0) -> tuple:
    """Draw x, gate, skip, gain and bias; data and cotangent have scale `scale`."""
    rng = np.random.default_rng(seed)

    def data() -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=(B, T, H, V)), dtype)

    def wide(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    x, gate, other = data(), data(), data()
    factors = wide(B, T, H) if kind.skip == "B T H" else wide(1, 1, H)
    heads = 1 if kind.is_shared else H
    gain, bias = 1 + wide(heads, V), wide(heads, V)
    skip = (other, factors) if kind.skip else None
    return x, gate if kind.activation else None, skip, gain, bias if kind.has_bias else None


def op(kind: Kind, *arrays, implementation=None):
    x, gate, skip, gain, bias = arrays
    if kind.with_input:
        x_BTD, bias_D = x.reshape(*x.shape[:2], -1), None if bias is None else bias.reshape(-1)
        both = kp.residual_norm(x_BTD, gain_D=gain.reshape(-1), bias_D=bias_D, eps=1e-5, implementation=implementation)
        return tuple(y_BTD.reshape(x.shape) for y_BTD in both)
    return kp.head_norm(x, gate, skip, gain_HV=gain, bias_HV=bias, implementation=implementation, **options(kind))


def with_gradients(f, arrays, dy):
    """Return y and the gradients of all arrays."""

    @fast_jit
    def run(arrays, dy):
        y, pull = jax.vjp(f, *arrays)
        return y, pull(dy)

    return run(arrays, dy)


def cotangent(kind: Kind, arrays, seed=1) -> Any:
    """Draw a cotangent for y, or for x and y."""
    draws = np.random.default_rng(seed).normal(size=(1 + kind.with_input, *arrays[0].shape))
    cotangents = tuple(jnp.asarray(draw, arrays[0].dtype) for draw in draws)
    return cotangents if kind.with_input else cotangents[0]


def assert_right(kind: Kind, arrays, got, dtype: str) -> None:
    """Check dtypes and errors of results.

    Results have the operand dtypes and are rounded once. The float32 error is at most 32 half ulps of the largest
    value. Intermediates are float32: about ten operations per number, and sums of at most 840 terms. The largest
    observed error is 16 half ulps.
    """
    with jax.enable_x64(True):
        wide, dy = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (arrays, cotangent(kind, arrays)))
        want = with_gradients(partial(reference.head_norm, **options(kind)), wide, dy)
        want = jax.tree.map(np.asarray, want)
    leaves, wanted = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
    operands = [arrays[0], *arrays[:1] * kind.with_input, *jax.tree.leaves(arrays)]
    assert [x.dtype for _, x in leaves] == [x.dtype for x in operands]
    for (path, x), (_, w) in zip(leaves, wanted, strict=True):
        relative, least = ROUNDING[str(x.dtype)]
        off = np.abs(np.asarray(x, np.float64) - w) - relative * np.abs(w) - least
        assert x.shape == w.shape
        assert np.isfinite(np.asarray(x, np.float64)).all(), jax.tree_util.keystr(path)
        units = off.max() / (EPS * np.abs(w).max(initial=1e-30))
        assert units <= 32, (
            f"{jax.tree_util.keystr(path)}: {units:.1f} half units of float32 beyond a rounding to {dtype}"
        )


# Part of a tile, and several programs; channels that fill a tile or not; an even number of heads, or a single head.
SIZES = [(5, 3, 96), (70, 6, 24), (1, 2, 64), (70, 1, 64)]
CASES = [(name, size, dtype) for dtype in ("bfloat16", "float32") for size in SIZES for name in KINDS]


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    support.slow_unless(lambda _, size, dtype: (size, dtype) in ((SIZES[0], "bfloat16"), (SIZES[1], "float32")), CASES),
)
def test_equals_double_precision(implementation, name, size, dtype) -> None:
    kind, (T, H, V) = KINDS[name], size
    arrays = draw(kind, 2, T, H, V, dtype=dtype)
    got = with_gradients(partial(op, kind, implementation=implementation), arrays, cotangent(kind, arrays))
    assert_right(kind, arrays, got, dtype)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("name", ["rwkv7", "mamba2", "kda", "gated_deltanet"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_data_scales(implementation, name, dtype, scale) -> None:
    """Includes gates with exponentials that overflow."""
    kind = KINDS[name]
    arrays = draw(kind, dtype=dtype, scale=scale)
    got = with_gradients(partial(op, kind, implementation=implementation), arrays, cotangent(kind, arrays))
    assert_right(kind, arrays, got, dtype)


@pytest.mark.parametrize("name", KINDS)
def test_heads_and_tokens_of_zeros(implementation, name) -> None:
    kind = KINDS[name]
    x, gate, skip, *parameters = draw(kind)
    x = x.at[0, 1:3].set(0).at[1, 2, 1].set(0)
    skip = None if skip is None else (skip[0].at[0, 1:3].set(0), skip[1])
    arrays = (x, gate, skip, *parameters)
    got = with_gradients(partial(op, kind, implementation=implementation), arrays, cotangent(kind, arrays))
    assert_right(kind, arrays, got, "float32")


def test_gradients_in_half_precision(implementation) -> None:
    kind = KINDS["rwkv7"]
    arrays = draw(kind, dtype="float16")
    got = with_gradients(partial(op, kind, implementation=implementation), arrays, cotangent(kind, arrays))
    assert_right(kind, arrays, got, "float16")


def test_a_gate_in_float32_of_bfloat16_data(implementation) -> None:
    kind = KINDS["gated_deltanet"]
    x, gate, *rest = draw(kind, dtype="bfloat16")
    arrays = (x, gate.astype(jnp.float32), *rest)
    got = with_gradients(partial(op, kind, implementation=implementation), arrays, cotangent(kind, arrays))
    assert_right(kind, arrays, got, "bfloat16")


@pytest.mark.parametrize("bias", [False, True])
def test_the_norm_of_a_float32_stream_in_16_bits(implementation, bias) -> None:
    """y and its gradient have 16 bits, x and its gradient 32.

    Blocks that add in float32 need this.
    """
    kind = KINDS["layernorm" if bias else "rmsnorm"]
    x, _, _, gain, shift = draw(kind)
    x_BTD, gain_D, bias_D = x.reshape(2, 5, -1), gain.reshape(-1), None if shift is None else shift.reshape(-1)
    dx, dy = (d.reshape(x_BTD.shape) for d in cotangent(kind, (x,)))

    def f(dtype, x_BTD, dy):
        def run(x_BTD):
            more = {"gain_D": gain_D, "bias_D": bias_D, "eps": 1e-5, "implementation": implementation}
            return kp.residual_norm(x_BTD, **more, dtype=dtype)

        (passed, y), pull = jax.vjp(run, x_BTD)
        return passed, y, pull((dx, dy))[0]

    passed, y, got = fast_jit(partial(f, "bfloat16"))(x_BTD, dy.astype(jnp.bfloat16))
    _, y_wide, want = fast_jit(partial(f, None))(x_BTD, dy.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(passed, x_BTD)
    assert (y.dtype, got.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(y, y_wide.astype(jnp.bfloat16))
    # The two programs may fuse different multiply-adds, which costs some ulps on a GPU.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("implementation", ["triton"])
def test_with_the_tiles_of_a_gpu(monkeypatch, implementation, name) -> None:
    monkeypatch.setattr(norm, "interpreter", SimpleNamespace(is_chosen=lambda: False))
    kind = KINDS[name]
    arrays = draw(kind, 1, 70, 12, 64, dtype="bfloat16")
    got = with_gradients(partial(op, kind, implementation=implementation), arrays, cotangent(kind, arrays))
    assert_right(kind, arrays, got, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("implementation", ["triton"])
def test_loading_ahead_changes_no_bit(monkeypatch, implementation, name, stages) -> None:
    """Loads ahead changed results in a delta-rule kernel (Triton 3.6 on an H200)."""
    kind = KINDS[name]
    arrays = draw(kind, 2, 300, 12, 64, dtype="bfloat16")
    f, dy = partial(op, kind, implementation=implementation), cotangent(kind, arrays)
    want = with_gradients(f, arrays, dy)
    monkeypatch.setattr(norm, "TILES", {key: tile._replace(stages=stages) for key, tile in norm.TILES.items()})
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, with_gradients(f, arrays, dy), want)


@pytest.mark.parametrize("name", ["rwkv7", "mamba2"])
def test_tokens_are_independent(implementation, name) -> None:
    """A changed token leaves results and gradients at other tokens bitwise equal."""
    kind = KINDS[name]
    arrays = draw(kind, T=11)
    if kind.skip == "H":  # expand to one factor per token, for a gradient per token
        arrays = (*arrays[:2], (arrays[2][0], jnp.broadcast_to(arrays[2][1], (2, 11, 6))), *arrays[3:])
    f, dy = partial(op, kind, implementation=implementation), cotangent(kind, arrays)
    others = np.arange(11) != 6
    changed = jax.tree.map(lambda x: x.at[:, 6].multiply(-3) if x.ndim > 2 else x, arrays)

    def seen(arrays, dy):
        y, (*data, _, _) = with_gradients(f, arrays, dy)
        return jax.tree.map(lambda x: np.asarray(x)[:, others], (y, data))

    jax.tree.map(np.testing.assert_array_equal, seen(changed, dy.at[:, 6].multiply(2)), seen(arrays, dy))


def test_under_vmap_equals_a_loop(implementation) -> None:
    """Mapped elements share the parameters."""
    kind = KINDS["rwkv7"]
    each = [draw(kind, seed=seed)[:3] for seed in range(2)]
    parameters = draw(kind)[3:]

    def f(*data):
        y, pull = jax.vjp(partial(op, kind, implementation=implementation), *data, *parameters)
        return y, pull(jnp.cos(y))

    got = fast_jit(jax.vmap(f))(*jax.tree.map(lambda *x: jnp.stack(x), *each))
    want = jax.tree.map(lambda *x: jnp.stack(x), *(fast_jit(f)(*x) for x in each))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_the_backward_pass_keeps_only_inputs_and_statistics(implementation) -> None:
    """At most two numbers per token and head are kept in addition to the data.

    Gains are small.
    """
    kind = KINDS["rwkv7"]
    arrays = draw(kind, T=40, V=64)
    pull = jax.eval_shape(lambda *a: jax.vjp(partial(op, kind, implementation=implementation), *a)[1], *arrays)
    kept = sum(x.size for x in jax.tree.leaves(pull) if x.ndim > 2)
    data = sum(x.size for x in jax.tree.leaves(arrays) if x.ndim > 2)
    assert data <= kept <= data + 2 * 2 * 40 * 6 + 2 * 2 * 6 * 64


@pytest.mark.parametrize("gate_first", [False, True])
def test_every_device_works_on_its_tokens(monkeypatch, gate_first) -> None:
    """Devices may split time, and also heads unless a single norm covers all.

    Array code replaces the kernels.
    """
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    kind = KINDS["rwkv7"]._replace(gate_first=gate_first)
    arrays, shapes = draw(kind, T=8), []
    call = Call("none", gate_first, 1e-5)

    def forward(*leaves, call, structure):
        shapes.append(leaves[0].shape)
        x, gate, skip, gain, bias = jax.tree.unflatten(structure, leaves)
        gain, bias = gain[:, None], bias[:, None]  # by sequence
        return reference.head_norm(x, gate, skip, gain, bias, **call._asdict())

    def backward(*leaves, call, structure):
        *leaves, dy = leaves
        return jax.vjp(lambda *x: forward(*x, call=call, structure=structure), *leaves)[1](dy)

    monkeypatch.setattr(norm, "_run_forward", forward)
    monkeypatch.setattr(norm, "_run_backward", backward)
    monkeypatch.setattr("kernels_pallas.triton.interpreter.is_chosen", lambda: False)
    f, dy = partial(norm.run, call=call), cotangent(kind, arrays)
    want = with_gradients(lambda *a: reference.head_norm(*a, **call._asdict()), arrays, dy)
    devices, kinds = jax.devices()[:4], (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("seq", "tensor"), axis_types=kinds, devices=devices)
    heads = None if gate_first else "tensor"
    split = lambda x: NamedSharding(mesh, P(None, "seq", heads) if x.ndim > 2 else P(heads))  # noqa: E731
    with jax.set_mesh(mesh):
        got = with_gradients(f, *jax.tree.map(lambda x: jax.device_put(x, split(x)), (arrays, dy)))
    assert shapes[-1] == (2, 4, 6 if gate_first else 3, 24)
    for x in (got[0], *got[1][:2]):
        assert x.sharding.is_equivalent_to(split(x), 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.parametrize(("name", "split", "used"), [("mamba2", 2, "xla"), ("mamba2", 1, "mine"), ("rwkv7", 2, "mine")])
def test_norms_over_sharded_channels_use_xla(monkeypatch, name, split, used) -> None:
    if jax.device_count() < split:
        pytest.skip("needs two devices")
    monkeypatch.setattr(limits, "machine", lambda problem: None)
    xla = kp.Backend("mine", lambda: backend_of_xla(), refusal)  # accepts the same calls as triton
    monkeypatch.setattr(backend, "_outside", {"head_norm": {"mine": xla}})
    kind = KINDS[name]
    x, gate, skip, gain, bias = draw(kind, H=2)
    more = {"skip": skip, "gain": gain.reshape(-1), "bias": None if bias is None else bias.reshape(-1)}
    f = partial(head_norm, **more, **options(kind), implementation=None)
    mesh = sharding.make_mesh(tensor=split, devices=jax.devices()[:split])
    with jax.set_mesh(mesh):
        jax.eval_shape(f, x, gate.reshape(2, 5, -1))
    assert kp.backends_used()["head_norm"] == used


def backend_of_xla():
    from kernels_pallas.head_norm import xla

    return xla


def test_one_token_uses_xla(monkeypatch) -> None:
    """In decoding, a kernel launch gains nothing."""
    monkeypatch.setattr(backend, "_outside", {"head_norm": {"mine": kp.Backend("mine", backend_of_xla)}})
    for T, used in ((1, "xla"), (2, "mine")):
        jax.eval_shape(lambda x: head_norm(x, gain=jnp.ones(24), eps=1e-5), jnp.ones((2, T, 6, 24)))
        assert kp.backends_used()["head_norm"] == used


MIXERS = {
    "rwkv7": partial(mixers.RWKV7, heads=2),
    "mamba2": partial(mixers.Mamba2, head_dim=8, state=4),
    "gated_deltanet": partial(mixers.GatedDeltaNet, heads=2),
    "kda": partial(mixers.KDA, heads=2),
    "gla": partial(mixers.GLA, heads=2),
    "rwkv6": partial(mixers.RWKV6, head_dim=8),
}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("implementation", ["triton"])
def test_mixer_gradients_match_xla(monkeypatch, implementation, name) -> None:
    gradients = mixer_gradients(MIXERS[name])
    monkeypatch.setattr(backend, "_outside", {"head_norm": {"plain": kp.Backend("plain", backend_of_xla)}})
    want = gradients()
    assert kp.backends_used()["head_norm"] == "plain"
    monkeypatch.setattr(backend, "_outside", {"head_norm": {"mine": kp.Backend("mine", load)}})
    got = gradients()
    assert kp.backends_used()["head_norm"] == "mine"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()), got, want)


def problem(*, dtype="bfloat16", wide="float32", H=24, V=64, gate_first=True, is_split=False) -> backend.Problem:
    shapes = (((2, 8, H, V), dtype), ((2, 8, H, V), dtype), ((H, V), wide))
    operands = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in shapes)
    return backend.Problem("gpu", operands, {"n_data": 2, "gate_first": gate_first, "is_split": is_split})


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    assert refusal(problem()) is None
    assert refusal(problem(dtype="float32", H=128)) is None
    assert refusal(problem(H=1000, gate_first=False)) is None
    assert refusal(problem(gate_first=False, is_split=True)) is None
    assert re.search("16384 channels .* 8192", str(refusal(problem(H=129))))
    assert "devices share" in str(refusal(problem(is_split=True)))
    assert "factors float32" in str(refusal(problem(wide="bfloat16")))
    assert "are float32 and float8_e4m3fn" in str(refusal(problem(dtype="float8_e4m3fn")))


def test_double_precision_uses_xla() -> None:
    kind = KINDS["rwkv7"]
    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda x: x.astype(jnp.float64), draw(kind))
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton)"):
            op(kind, *arrays, implementation="triton")
        dy = cotangent(kind, arrays)
        got = with_gradients(partial(op, kind), arrays, dy)
        want = with_gradients(partial(reference.head_norm, **options(kind)), arrays, dy)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), got, want)


def test_wrong_options_are_named() -> None:
    x, gain = jnp.ones((2, 5, 6, 24)), jnp.ones((1, 24))
    with pytest.raises(ValueError, match=r"activation 'sigmoyd'.*'sigmoid'"):
        kp.head_norm(x, x, gain_HV=gain, eps=1e-5, activation="sigmoyd")
    with pytest.raises(ValueError, match=r"eps .*0\.0"):
        kp.head_norm(x, gain_HV=gain, eps=0.0)


@pytest.mark.parametrize(
    ("kind", "heads", "rows"),
    [
        ("backward", (12, 64), (4, 2, 16, 2, 1)),  # RWKV-5 to 7
        ("backward", (6, 192), (2, 1, 16, 2, 1)),  # Gated DeltaNet
        ("backward", (8, 96), (4, 1, 16, 2, 1)),  # DeltaNet
        ("backward", (6, 128), (2, 2, 16, 2, 1)),  # KDA
        ("backward", (5, 24), (1, 16, 16, 2, 1)),
        ("backward", (1, 2048), (1, 1, 16, 2, 4)),
        ("backward_all", (24, 64), (32, 1, 16, 3, 8)),  # Mamba-2
        ("forward_all", (64, 64), (64, 1, 4, 3, 8)),  # Mamba-2 at 1.3B
        ("forward_all", (64, 128), (64, 1, 4, 1, 16)),  # too wide for more than one load in flight
    ],
)
def test_tiles_have_no_padding_heads(monkeypatch: pytest.MonkeyPatch, kind, heads, rows) -> None:
    """Heads with separate norms form groups without padding."""
    monkeypatch.setattr(norm.interpreter, "is_chosen", lambda: False)
    assert norm.rows(kind, jnp.zeros((1, 1, *heads), jnp.bfloat16)) == rows
