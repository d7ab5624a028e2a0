"""KDA and Gated DeltaNet-2 from pre-activations: both backends against the recurrence in float64."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.kda import reference
from tests import extras, support
from tests.kernels.common import (
    assert_close,
    assert_each_close,
    assert_trees_close,
    count_primitive,
    fast_jit,
    outputs_and_gradients,
)

scan = extras.triton_module("kda.triton.scan")

NAMES = ("q", "k", "v", "decay", "beta", "rate", "bias", "state")


def draw(gates, T, K, V, *, decay: float, B=1, H=2, dtype="float32", seed=0) -> list[Any]:
    """Draw the operands, with log decays around -`decay`; inf mixes very weak and very strong ones."""
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=shape)  # noqa: E731
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (f(B, T, H, K), f(B, T, H, K)))
    mixed = rng.choice([-9.0, -3.0, 0.5, 30.0], size=(B, T, H, K))
    z = mixed if math.isinf(decay) else math.log(math.expm1(decay)) + 0.5 * f(B, T, H, K)
    beta = f(B, T, H, K) if gates == "channels" else f(B, T, H)
    low = [jnp.asarray(x, dtype) for x in (q, k, f(B, T, H, V), z)]
    beta = jnp.asarray(beta, dtype if gates == "channels" else jnp.float32)
    wide = (np.exp(0.3 * f(H)), 0.3 * f(H, K), f(B, H, K, V))
    return [*low, beta, *(jnp.asarray(x, jnp.float32) for x in wide)]


def op(q, k, v, decay, beta, rate, bias, state, *, chunk=64, implementation=None, **options):
    options |= {"rate_H": rate, "bias_HK": bias, "chunk_size": chunk, "implementation": implementation}
    return kp.kda(q, k, v, decay, beta, state, **options)


with_gradients = partial(outputs_and_gradients, like=partial(op, implementation="xla"), names=NAMES)

# Several chunks with a partial last chunk, blocks of keys with a partial one, and one position.
CASES = [
    ("heads", (37, 20, 8), 16, 0.3, None),
    ("channels", (37, 8, 20), 16, math.inf, None),
    ("heads", (130, 24, 40), 64, math.inf, None),
    ("channels", (130, 16, 16), 64, 1e-3, None),
    ("heads", (65, 8, 16), 64, 3.0, -5.0),
    ("channels", (64, 20, 8), 64, 30.0, None),
    ("heads", (1, 5, 6), 64, 0.3, None),
]


@pytest.mark.parametrize(
    ("gates", "shape", "chunk", "decay", "lower"), support.slow_unless(lambda *case: case in CASES[:1], CASES), ids=str
)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_equals_the_recurrence(implementation, gates, shape, chunk, decay, lower) -> None:
    arrays = draw(gates, *shape, decay=decay)
    want = with_gradients(partial(reference.kda, lower_bound=lower), arrays, wide=True)
    got = with_gradients(partial(op, chunk=chunk, lower_bound=lower, implementation=implementation), arrays)
    # With strong decays, the gradients of rates and biases are sums that cancel.
    noisy = {} if decay < 1 else {name: want[1].pop(name) for name in ("rate", "bias")}
    for name, w in noisy.items():
        assert_close(got[1].pop(name), w, "float32", name, scale=100 * max(1.0, np.abs(w).max()))
    assert_each_close(got, want, slack=3 if math.isinf(decay) else 1, of_ones="decay")


ROUNDINGS, UNIT = 16, 2.0**-8  # as in test_linear_attention.py


@pytest.mark.parametrize("gates", support.slow_unless(lambda gates: gates == "heads", ["heads", "channels"]))
@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "triton"])
def test_16_bit_inputs_round_operands_only(implementation, gates) -> None:
    arrays = draw(gates, 130, 16, 24, decay=0.3, dtype="bfloat16")
    got = with_gradients(partial(op, implementation=implementation), arrays)
    assert [x.dtype for x in got[0]] == [jnp.bfloat16, np.float32]
    want = with_gradients(reference.kda, arrays, wide=True)
    for name, x in zip(NAMES, arrays, strict=True):
        assert got[1][name].dtype == x.dtype
    # Gradients of biases and rates are sums of decay gradients: running sums of pairs, whose errors have one sign.
    most = np.abs(want[1]["decay"]).max()
    scales = {"bias": 130 * most, "rate": 130 * 16 * most}
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        scale = max([np.abs(w).max(), *(x for part, x in scales.items() if part in name)])
        assert np.abs(g.astype(np.float64) - w).max() <= math.sqrt(ROUNDINGS) * UNIT * scale, name


@pytest.mark.usefixtures("gpus_order_of_sums")
@pytest.mark.parametrize("implementation", ["triton"])
def test_sums_of_strong_decays_have_equal_rounding(implementation) -> None:
    """The weight of the last written key is 1, a difference of sums near 3,000."""
    arrays = draw("channels", 64, 20, 8, decay=30.0)
    got = fast_jit(partial(op, implementation=implementation))(*arrays)
    assert_trees_close(got, fast_jit(reference.kda)(*arrays))


@pytest.mark.slow
@pytest.mark.usefixtures("gpus_order_of_sums")
@pytest.mark.parametrize("gates", ["heads", "channels"])
@pytest.mark.parametrize("implementation", ["triton"])
def test_is_causal_and_deterministic(implementation, gates) -> None:
    """Outputs keep their bits if a later decay of the chunk takes another path."""
    arrays = draw(gates, 70, 20, 8, decay=0.9)
    run = fast_jit(partial(op, implementation=implementation))
    want = np.asarray(run(*arrays)[0])
    np.testing.assert_array_equal(run(*arrays)[0], want)
    for t in (20, 50, 66):
        q, k, v, decay, *rest = arrays
        changed = [x.at[:, t].add(3.0) for x in (q, k, v)]
        got = run(*changed, decay.at[:, t].set(90.0), *rest)[0]
        np.testing.assert_array_equal(got[:, :t], want[:, :t])
        assert np.any(got[:, t] != want[:, t])


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.slow)])
def test_documents_do_not_read_each_other(implementation) -> None:
    """The state is zero before the second document."""
    arrays = draw("heads", 40, 8, 8, decay=0.3)
    q, k, v, decay, beta, rate, bias, state = arrays
    segments = jnp.asarray(np.arange(40) >= 17, jnp.int32)[None]
    got = fast_jit(partial(op, segments=segments, implementation=implementation))(*arrays)
    recurrence = fast_jit(reference.kda)
    first, _ = recurrence(*(x[:, :17] for x in (q, k, v, decay, beta)), rate, bias, state)
    rest = (x[:, 17:] for x in (q, k, v, decay, beta))
    second, last = recurrence(*rest, rate, bias, jnp.zeros_like(state))
    assert_close(got[0], jnp.concatenate([first, second], axis=1), "float32")
    assert_close(got[1], last, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("gates", ["heads", "channels"])
@pytest.mark.parametrize("implementation", ["triton"])
def test_under_vmap_equals_a_loop(implementation, gates) -> None:
    arrays = draw(gates, 37, 8, 8, decay=0.3)
    each = [arrays, [0.5 * x for x in arrays]]

    def gradients(*arrays):
        out, pull = jax.vjp(partial(op, implementation=implementation), *arrays)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    got = fast_jit(jax.vmap(gradients))(*(jnp.stack(x) for x in zip(*each, strict=True)))
    assert_trees_close(got, jax.tree.map(lambda *x: np.stack(x), *(fast_jit(gradients)(*x) for x in each)))


@pytest.mark.parametrize("implementation", ["triton"])
def test_a_policy_that_keeps_states_and_inverses_repeats_no_kernel(implementation) -> None:
    arrays = draw("heads", 20, 4, 4, decay=0.3)

    def passes(policy: Any) -> int:
        """Run forward, backward, and forward again."""
        run = jax.checkpoint(lambda *x: op(*x, implementation=implementation)[0].sum(), policy=policy)
        return count_primitive(jax.make_jaxpr(jax.grad(run))(*arrays).jaxpr, "custom_vmap_call")

    saved = jax.checkpoint_policies.save_only_these_names("chunk_inverse", "chunk_states")
    assert (passes(saved), passes(None)) == (2, 3)


def test_unsupported_options_are_refused() -> None:
    arrays = draw("heads", 4, 4, 4, decay=0.3)
    with pytest.raises(ValueError, match="chunk_size"):
        op(*arrays, chunk=0)
    with pytest.raises(ValueError, match="lower_bound is 0"):
        op(*arrays, lower_bound=0.0)
