"""The short convolution against its equation in float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax.nn import ShortConv
from tests.nn.common import fill, rng, value


@pytest.mark.parametrize(
    ("width", "bias", "silu"), [(4, True, True), (3, False, True), (4, False, False), (1, True, False)]
)
def test_short_conv_and_its_cache(width, bias, silu):
    conv = fill(ShortConv(6, width=width, bias=bias, silu=silu, rngs=nnx.Rngs(0)))
    x = rng.standard_normal((2, 9, 6), np.float32)
    padded = np.concatenate([np.zeros((2, width - 1, 6)), x], axis=1)
    want = sum(padded[:, i : i + 9] * value(conv.w)[:, i] for i in range(width)) + (value(conv.b) if bias else 0)
    want = want / (1 + np.exp(-want)) if silu else want
    np.testing.assert_allclose(conv(jnp.asarray(x)), want, rtol=1e-5, atol=1e-5)
    # In pieces; some are shorter than the filter.
    cache, parts = conv.init_cache(2, jnp.float32), []
    for piece in np.split(x, [1, 3, 8], axis=1):
        part, cache = conv.extend(jnp.asarray(piece), cache)
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), want, rtol=1e-5, atol=1e-5)
    assert cache.shape == (2, width - 1, 6)
