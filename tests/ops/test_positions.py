"""Rotary positions and ALiBi against float64 numpy."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.ops.positions import RopeScaling, alibi_slopes, rope, rope_angles, rope_frequencies
from tests import support

rng = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("max_len", "base"),
    support.slow_unless(
        lambda *case: case in [(1, 1e4), (2048, 1e6), (102_400, 1e4)],
        itertools.product([1, 2, 2048, 102_400, 2**20], [1e4, 1e6]),
    ),
)
def test_rope_angles_are_exact_at_long_positions(base, max_len):
    """Plain float32 is off by 6e-3 rad at position 100k; two float64 tables and one product must stay exact."""
    picked = np.unique(np.concatenate([np.arange(min(max_len, 300)), rng.integers(0, max_len, 500), [max_len - 1]]))
    cos, sin = rope_angles(jnp.asarray(picked), head_dim=64, base=base, max_len=max_len)
    angles = picked[:, None] * base ** (-np.arange(0, 64, 2) / 64)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=4e-7)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=4e-7)


def llama3(frequency, *, factor, low, high, length):
    """Return Llama 3.1's scaled frequency for one pair, by its wavelength in tokens."""
    tokens = 2 * math.pi / frequency
    if tokens < length / high:
        return frequency
    if tokens > length / low:
        return frequency / factor
    smooth = (length / tokens - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


@pytest.mark.parametrize(("factor", "low", "high", "length"), [(8, 1, 4, 8192), (32, 1, 4, 8192), (3, 0.3, 2.5, 100)])
def test_llama_3_frequencies(factor, low, high, length):
    """Settings of Llama 3.1 and 3.2 (heads of 128 and 64 channels, base 500,000), and another one."""
    for head_dim in (64, 128):
        plain = rope_frequencies(head_dim=head_dim, base=5e5)
        got = rope_frequencies(head_dim=head_dim, base=5e5, scaling=RopeScaling("llama3", factor, low, high, length))
        want = [llama3(5e5 ** (-i / (head_dim / 2)), factor=factor, low=low, high=high, length=length)
                for i in range(head_dim // 2)]  # fmt: skip
        np.testing.assert_allclose(got, want, rtol=1e-12)
        ratio = got / plain
        assert ratio[0] == 1
        assert ratio[-1] == pytest.approx(1 / factor)
        assert ((ratio < 1 - 1e-9) & (ratio > 1 / factor + 1e-9)).sum() >= 3, "some are mixed"


def test_partial_rope_rotates_the_first_channels_with_their_frequencies():
    x_BTHK = jnp.asarray(rng.standard_normal((1, 50, 2, 16), np.float32))
    angles = rope_angles(jnp.arange(50), head_dim=4, base=1e4, max_len=50)
    got = rope(x_BTHK, *angles)
    np.testing.assert_array_equal(got[..., :4], rope(x_BTHK[..., :4], *angles))
    np.testing.assert_array_equal(got[..., 4:], x_BTHK[..., 4:])


def test_linear_scaling_divides_positions():
    scaling = RopeScaling("linear", 4.0, 1.0, 4.0, 8192)
    got = rope_angles(jnp.arange(0, 4000, 4), head_dim=64, base=1e4, max_len=4000, scaling=scaling)
    want = rope_angles(jnp.arange(1000), head_dim=64, base=1e4, max_len=1000)
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-7)


def test_rope_rotates_halves_and_scores_depend_on_distance():
    x_BTHK = rng.standard_normal((1, 50, 2, 8), np.float32)
    cos, sin = rope_angles(jnp.arange(50), head_dim=8, base=1e4, max_len=50)
    got = np.asarray(rope(jnp.asarray(x_BTHK), cos, sin), np.float64)
    z = (x_BTHK[..., :4] + 1j * x_BTHK[..., 4:]) * np.exp(1j * np.arange(50)[:, None] * 1e4 ** (-np.arange(4) / 4))[
        :, None
    ]
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], -1), atol=1e-5)
    # With one vector at all positions, q . k depends only on i - j.
    same = np.asarray(rope(jnp.broadcast_to(jnp.asarray(x_BTHK[:, :1]), x_BTHK.shape), cos, sin))[0, :, 0]
    scores = same @ same.T
    np.testing.assert_allclose(scores[5:, 5:], scores[:-5, :-5], atol=1e-4)
    assert not np.allclose(scores[0, 1], scores[0, 2], atol=1e-3)


def test_rope_keeps_the_dtype_and_computes_in_float32():
    cos, sin = rope_angles(jnp.asarray([100_000]), head_dim=8, base=1e4, max_len=102_400)
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    out = rope(x, cos, sin)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out[0, 0, 0, :4], np.float64), np.asarray(cos - sin)[0], atol=2**-8)


def test_alibi_slopes():
    """The public code for 12 heads uses the slopes of 8 heads, then every second slope of 16 heads."""
    want = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)]
    np.testing.assert_allclose(alibi_slopes(12), want)
