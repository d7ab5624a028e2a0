"""The recurrences at operand and decay scales from 1e-4 to 1e4.

Each case has a thousand sequences.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas.delta_rule import reference as delta_reference
from kernels_pallas.linear_attention import reference as linear_reference
from kernels_pallas.log_linear import reference as log_linear_reference
from kernels_pallas.selective_scan import reference as selective_reference
from kernels_pallas.ssd import reference as ssd_reference
from tests import support
from tests.kernels.common import ON_GPU, TOLERANCE, fast_jit

T, H, K, V = 70, 1, 8, 16
CHUNK = 32


class Draws:
    """Draw operands for `n` sequences, [n, *shape]."""

    def __init__(self, n: int):
        self.n, self.rng = n, np.random.default_rng(0)

    def normal(self, *shape: int) -> np.ndarray:
        """Draw normal numbers with a random scale per sequence."""
        x = self.rng.normal(size=(self.n, *shape))
        return x * 10 ** self.rng.uniform(-4, 4, size=(self.n, *(1,) * len(shape)))

    def log_decay(self, *shape: int) -> np.ndarray:
        """Draw log decays at these scales.

        Some sequences never forget, others forget within a token.
        """
        return -abs(self.normal(*shape))

    def unit(self, *shape: int) -> np.ndarray:
        x = self.rng.normal(size=(self.n, *shape))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def share(self, *shape: int) -> np.ndarray:
        """Draw numbers between 0 and 1."""
        return 1 / (1 + np.exp(-2 * self.rng.normal(size=(self.n, *shape))))


def draw_delta_rule(d: Draws) -> dict[str, np.ndarray]:
    """Draw operands with unit keys.

    Keys feed back into the state, and longer keys would let it grow without bound.
    """
    return {
        "q": d.normal(T, H, K),
        "k": d.unit(T, H, K),
        "v": d.normal(T, H, V),
        "beta": 2 * d.share(T, H),
        "log_g": d.log_decay(T, H),
        "state": d.normal(H, K, V),
    }


def run_delta_rule(q, k, v, beta, log_g, state, **options):
    return kp.delta_rule(q, k, v, beta, log_g, state, chunk_size=CHUNK, **options)


def draw_plain(d: Draws) -> dict[str, np.ndarray]:
    return {
        "r": d.normal(T, H, K),
        "k": d.normal(T, H, K),
        "v": d.normal(T, H, V),
        "log_w": d.log_decay(T, H, K),
        "state": d.normal(H, K, V),
    }


def draw_low_rank(d: Draws) -> dict[str, np.ndarray]:
    kappa = d.unit(T, H, K)
    return draw_plain(d) | {"a": -kappa, "b": kappa * d.share(T, H, K)}


def run_linear_attention(r, k, v, log_w, state, a=None, b=None, **options):
    low_rank = None if a is None else (a, b)
    return kp.linear_attention(r, k, v, log_w, None, state, low_rank=low_rank, chunk_size=CHUNK, **options)


def linear_recurrence(r, k, v, log_w, state, a=None, b=None):
    return linear_reference.linear_attention(r, k, v, log_w, None, a, b, state)


def draw_ssd(d: Draws) -> dict[str, np.ndarray]:
    return {
        "x": d.normal(T, H, V),
        "log_a": d.log_decay(T, H),
        "b": d.normal(T, K),
        "c": d.normal(T, K),
        "state": d.normal(H, K, V),
        "dt": abs(d.normal(T, H)),
    }


def run_ssd(x, log_a, b, c, state, dt, **options):
    return kp.ssd(x, log_a, b, c, state, dt, chunk_size=CHUNK, **options)


def draw_ssd_per_head(d: Draws) -> dict[str, np.ndarray]:
    """Draw operands with B and C per head, as in Mamba-3."""
    return draw_ssd(d) | {"b": d.normal(T, H, K), "c": d.normal(T, H, K)}


def draw_log_linear(d: Draws) -> dict[str, np.ndarray]:
    return {
        "x": d.normal(T, H, V),
        "log_a": d.log_decay(T, H),
        "b": d.normal(T, K),
        "c": d.normal(T, K),
        "m": d.share(T, H, 7),  # one level fewer than 70 tokens could use
    }


def run_log_linear(x, log_a, b, c, m, **options):
    y = kp.log_linear(x, log_a, b, c, m, chunk_size=CHUNK, **options)
    return y, y[:, -1]  # there is no state


def log_linear_sum(x, log_a, b, c, m):
    y = log_linear_reference.log_linear(x, log_a, b, c, m)
    return y, y[:, -1]


def draw_selective_scan(d: Draws) -> dict[str, np.ndarray]:
    """Draw A with different scales per channel, because all sequences share it."""
    return {
        "x": d.normal(T, K),
        "dt": abs(d.normal(T, K)),
        "A": -(10 ** d.rng.uniform(-4, 4, size=(K, V))),
        "B": d.normal(T, V),
        "C": d.normal(T, V),
        "D": d.rng.normal(size=K),
        "state": d.normal(K, V),
    }


def run_selective_scan(x, dt, A, B, C, D, state, **options):
    return kp.selective_scan(x, dt, A, B, C, D, state, **options)


WIDE = ("log_g", "log_w", "log_a", "beta", "dt", "m", "A", "D", "state")  # these operands are float32 for all dtypes
OPS = {
    "delta_rule": (run_delta_rule, delta_reference.delta_rule, draw_delta_rule),
    "linear_attention": (run_linear_attention, linear_recurrence, draw_plain),
    "low_rank": (run_linear_attention, linear_recurrence, draw_low_rank),
    "ssd": (run_ssd, ssd_reference.ssd, draw_ssd),
    "ssd_per_head": (run_ssd, ssd_reference.ssd, draw_ssd_per_head),
    "log_linear": (run_log_linear, log_linear_sum, draw_log_linear),
    "selective_scan": (run_selective_scan, selective_reference.selective_scan, draw_selective_scan),
}


def results(f: Any, arrays: dict[str, jax.Array], cotangents: Any) -> dict[str, np.ndarray]:
    """Return the outputs and the gradients by name, in float64."""

    @fast_jit
    def run(arrays, cotangents):
        out, pull = jax.vjp(f, *arrays)
        return out, pull(cotangents)

    (y, last), grads = run(tuple(arrays.values()), cotangents)
    named = {"y": y, "last": last, **{f"d{key}": x for key, x in zip(arrays, grads, strict=True)}}
    return {key: np.asarray(x, np.float64) for key, x in named.items()}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", support.slow_unless(lambda name: name in ("low_rank", "ssd", "delta_rule"), OPS))
def test_extreme_operand_and_decay_scales(implementation, name, dtype) -> None:
    """Compare at the scale of each array.

    In float32 all sequences must match, in bfloat16 nine of ten; all results are finite. A decay is the difference
    between two sums over a chunk, with an error of half an ulp each. Gradients of decays, beta and dt are differences
    between terms like q dq and k dk. A state that is forgotten at once may leave 1e-19, because decays have a floor. In
    bfloat16, corrections of 70 keys in 8 dimensions accumulate errors.
    """
    run, recurrence, draw = OPS[name]
    n = 1000 if ON_GPU or implementation == "xla" else 5  # the interpreter takes a second per sequence
    draws = Draws(n)
    arrays = {key: jnp.asarray(x, "float32" if key in WIDE else dtype) for key, x in draw(draws).items()}
    op = partial(run, implementation=implementation)
    cotangents = jax.tree.map(
        lambda x: jnp.asarray(draws.rng.normal(size=x.shape), x.dtype), jax.eval_shape(op, *arrays.values())
    )
    got = results(op, arrays, cotangents)
    with jax.enable_x64(True):
        wide = {key: jnp.asarray(x, jnp.float64) for key, x in arrays.items()}
        want = results(recurrence, wide, jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), cotangents))

    def largest(x: Any) -> np.ndarray:
        """Return the largest magnitude per sequence, or of a shared parameter."""
        x = np.asarray(x, np.float64)
        return abs(x.reshape(n if len(x) == n else 1, -1)).max(1)

    read, written = (
        next(arrays[key] for key in names if key in arrays) for names in (("q", "r", "c", "C"), ("k", "b", "B"))
    )
    terms = sum(largest(x * want[f"d{key}"]) for key, x in arrays.items() if x is read or x is written)
    sums = CHUNK * largest(next((x for key, x in arrays.items() if key.startswith("log_")), jnp.zeros(n)))
    for key, x in want.items():
        assert np.isfinite(got[key]).all(), key
        is_difference = key in ("dbeta", "ddt", "dlog_g", "dlog_w", "dlog_a")
        scale = np.maximum(largest(x), terms if is_difference else 1e-19 * np.maximum(1, largest(read)))
        excess = largest(got[key] - x) / scale - TOLERANCE[dtype] - 2.0**-23 * sums
        assert np.quantile(excess, 1 if dtype == "float32" else 0.9) <= 0, key
