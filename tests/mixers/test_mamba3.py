"""Mamba-3: trapezoidal rule, rotated keys, weak and strong decays, and cache."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels_pallas.mamba3_operands.xla import sum_of_turns
from seqjax import mixers
from seqjax.errors import UserError
from seqjax.mixers import mamba3
from seqjax.nn.params import Template
from seqjax.ops import ssd
from tests import support
from tests.models import oracle

DIM, HEADS, T = 8, 4, 70  # a chunk of 64 and a partial chunk
SETTINGS: dict[str, Any] = {"head_dim": 4, "state": 8}


def template(**settings):
    return Template(lambda rngs, _: mixers.Mamba3(DIM, **SETTINGS | settings, rngs=rngs))


def drawn(made):
    """Draw parameter values of a typical trained size."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape, np.float32), made.init(jax.random.key(0)))


def inputs(*shape):
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32))


def numpy_loop(params, x_BTD, **settings):
    """Compute the equations in float64."""
    m = types.SimpleNamespace(**{"rate": "heavy_tail", "norm": False, "angles": None} | SETTINGS | settings)
    return np.stack([oracle.mamba3(m, oracle.as_float64(params), row) for row in np.asarray(x_BTD, np.float64)])


def jax_loop(p, u_BTD, *, is_softplus=False):
    """Compute the equations in jax, for autodiff.

    It uses the paper's state, angle sums and complex numbers.
    """

    def rotated(row, angle):
        pairs = row[..., : 2 * angle.shape[-1]].reshape(*angle.shape, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * jnp.exp(1j * angle)
        flat = jnp.stack([turned.real, turned.imag], -1).reshape(*row.shape[:-1], -1)
        return jnp.concatenate([flat, row[..., flat.shape[-1] :]], -1)

    def body(carry, now):
        s, before, angle = carry
        b, c, x, step, trap, rate, turn = now
        angle, alpha = angle + turn, jnp.exp(-jnp.maximum(rate, 1e-4) * step)
        entering = jnp.einsum("bhn,bhv->bhnv", rotated(b, angle), x)
        weighted = ((1 - trap) * step * alpha)[..., None, None] * before + (trap * step)[..., None, None] * entering
        s = alpha[..., None, None] * s + weighted
        return (s, entering, angle), jnp.einsum("bhn,bhnv->bhv", rotated(c, angle), s)

    of = {name: u_BTD @ p[name]["w"] for name in ("z", "x", "bc", "dt", "rate", "trap", "angle")}
    b, c = (x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) for x in jnp.split(of["bc"], 2, axis=-1))
    b, c = (b * p["b_norm"]["g"])[:, :, None] + p["b_bias"], (c * p["c_norm"]["g"])[:, :, None] + p["c_bias"]
    step, trap, rate = jnp.logaddexp(of["dt"] + p["dt_bias"], 0), 1 / (1 + jnp.exp(-of["trap"])), of["rate"]
    rate = jnp.logaddexp(rate, 0) if is_softplus else jnp.where(rate > 0, 1 + rate, 1 / (1 + jnp.abs(rate)))
    turn = jnp.pi * jnp.tanh(of["angle"])[:, :, None] * step[..., None]
    x = of["x"].reshape(*step.shape, -1)
    zero = jnp.zeros((len(x), HEADS, b.shape[-1], x.shape[-1]), x.dtype)
    over_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (b, c, x, step, trap, rate, turn))
    _, y = jax.lax.scan(body, (zero, zero, 0 * turn[:, 0]), over_time)
    y = jnp.moveaxis(y, 0, 1) + p["skip"][:, None] * x
    return (y.reshape(of["z"].shape) * of["z"] / (1 + jnp.exp(-of["z"]))) @ p["out"]["w"]


def with_gradients(form, params, x_BTD):
    """Return outputs and the gradients of their weighted sum.

    Gradients are with respect to parameters and inputs.
    """

    def loss(params, x_BTD):
        y_BTD = form(params, x_BTD)
        return jnp.sum(y_BTD * jnp.cos(jnp.arange(y_BTD.size).reshape(y_BTD.shape))), y_BTD

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x_BTD)
    return np.asarray(y), jax.tree.map(np.asarray, gradients)


def assert_close(got, want, tolerance):
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * np.abs(w).max(), err_msg=name)


def in_float64(form, params, x_BTD):
    with jax.enable_x64(True):
        return with_gradients(form, *jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, x_BTD)))


@pytest.mark.parametrize(
    "settings",
    support.slow_unless(bool, [{}, {"rate": "softplus", "angles": 4, "chunk_size": 5}]),
    ids=str,
)
def test_values_and_gradients_match_the_recurrence(settings):
    made = template(**settings)
    params, x_BTD = drawn(made), inputs(2, T, DIM)
    got, gradients = with_gradients(lambda p, x: made.bind(p)(x), params, x_BTD)
    want, wanted = in_float64(lambda p, x: jax_loop(p, x, is_softplus="rate" in settings), params, x_BTD)
    np.testing.assert_allclose(want, numpy_loop(params, x_BTD, **settings), rtol=0, atol=1e-12 * np.abs(want).max())
    assert_close(got, want, 1e-5)
    assert_close(gradients, wanted, 1e-4)


@pytest.mark.slow
def test_without_trapezoid_and_rotation_equals_mamba_2():
    """Set lambda near 1, theta to 0 and the biases to 0."""
    made = template()
    params, x_BTD = drawn(made), inputs(1, T, DIM).at[..., 0].set(1.0)
    zero = ("b_bias", "c_bias", "angle", "trap")
    half = params | {name: jax.tree.map(jnp.zeros_like, params[name]) for name in zero}
    whole = half | {"trap": {"w": half["trap"]["w"].at[0].set(30.0)}}

    def wanted(mixer, x_BTD):
        b_BTN, c_BTN = jnp.split(mixer.bc(x_BTD), 2, axis=-1)
        x_BTHV, dt_BTH = mixer.x(x_BTD).reshape(1, T, HEADS, -1), jax.nn.softplus(mixer.dt(x_BTD) + mixer.dt_bias[...])
        log_a_BTH = -mamba3._heavy_tail(mixer.rate(x_BTD)) * dt_BTH
        y_BTHV: Any = ssd(x_BTHV, log_a_BTH, mixer.b_norm(b_BTN), mixer.c_norm(c_BTN), dt_BTH=dt_BTH)
        y_BTHV += mixer.skip[...][:, None] * x_BTHV
        return mixer.out(y_BTHV.reshape(1, T, -1) * jax.nn.silu(mixer.z(x_BTD)))

    run = jax.jit(lambda p, x: made.bind(p)(x))
    got, between, want = run(whole, x_BTD), run(half, x_BTD), wanted(made.bind(whole), x_BTD)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert np.abs(between - want).max() > 1e-2 * np.abs(want).max(), "the rule changes nothing here"


@pytest.mark.slow
def test_strong_and_weak_decays_in_one_head():
    """Log decays range from -130 to the minimum rate.

    Values and gradients match the recurrence.
    """
    made = template()
    params, x_BTD = drawn(made), inputs(1, T, DIM).at[..., 0].set(1.0)
    rate = jnp.zeros((DIM, HEADS)).at[0].set(jnp.array([100.0, -9.0, 1.0, -1e4]))
    params |= {"rate": {"w": rate}, "dt": {"w": 0 * rate}, "dt_bias": jnp.ones(HEADS)}
    got, gradients = with_gradients(lambda p, x: made.bind(p)(x), params, x_BTD)
    want, wanted = in_float64(jax_loop, params, x_BTD)
    assert_close(got, want, 1e-5)
    assert_close(gradients, wanted, 1e-4)


def test_angle_sums_stay_accurate_over_long_sequences():
    """Compare sums of 20,000 turns modulo 1 with float64.

    Rounding adds up to 5e-6; without the modulo it adds far more.
    """
    turn = np.random.default_rng(0).uniform(-0.1, 0.4, (1, 20_000, 2, 3)).astype(np.float32)
    start = np.full((1, 2, 3), 0.7, np.float32)
    want = np.float64(start[:, None]) + np.cumsum(turn, axis=1, dtype=np.float64)

    def off(got):
        return np.abs((np.asarray(got, np.float64) - want + 0.5) % 1 - 0.5).max()

    got = jax.jit(sum_of_turns)(turn, start)
    assert got.min() >= 0
    assert got.max() <= 1
    assert off(got) < 1e-5
    assert off(start[:, None] + np.cumsum(turn, axis=1, dtype=np.float32)) > 1e-4


def test_chunked_prefill_equals_the_parallel_form():
    """Outputs and final cache match the whole sequence.

    Pieces are single tokens, a whole chunk, and more than a chunk.
    """
    made = template(chunk_size=4)
    params, x_BTD = drawn(made), inputs(2, 41, DIM)
    start = made.bind(params).init_cache(2, 41, jnp.float32)
    run = jax.jit(lambda p, x, cache: made.bind(p).prefill(x, cache))
    (want, last), cache, parts, at = run(params, x_BTD, start), start, [], 0
    for n in (3, 1, 9, 1, 1, 4, 8, 1, 1, 9, 3):
        y_BTD, cache = run(params, x_BTD[:, at : at + n], cache)
        parts.append(y_BTD)
        at += n
    assert at == 41
    assert_close(jnp.concatenate(parts, axis=1), want, 1e-5)
    assert_close(cache, last, 1e-5)


def test_bfloat16_is_near():
    """Keys, queries and products are bfloat16, the rest float32.

    Allow a few units of 2^-8.
    """
    made = template()
    params, x_BTD = drawn(made), inputs(2, T, DIM).astype(jnp.bfloat16)
    got = jax.jit(lambda p, x: made.bind(p)(x))(params, x_BTD)
    assert got.dtype == jnp.bfloat16
    want = numpy_loop(params, x_BTD.astype(jnp.float32))
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=0.03 * np.abs(want).max())


def test_more_angles_than_pairs_are_refused():
    with pytest.raises(UserError, match=r"angles=5 .*8"):
        mixers.Mamba3(DIM, **SETTINGS, angles=5, rngs=nnx.Rngs(0))
