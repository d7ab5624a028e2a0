"""Settings of softmax attention: partial RoPE, the norm over all heads, and initial values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.errors import UserError

DIM, HEADS = 24, 2  # heads of 12 channels


def made(**settings):
    return mixers.TransformerPP(DIM, heads=HEADS, **settings, rngs=nnx.Rngs(0))


def inputs():
    return jnp.asarray(np.random.default_rng(0).standard_normal((1, 9, DIM)), jnp.float32)


def test_partial_rope_keeps_the_other_channels():
    """A quarter of 12 channels is 3, so the share here is a third."""
    (q, k), (plain_q, plain_k) = (
        made(**s).queries_and_keys(inputs()) for s in ({"rope_share": 1 / 3}, {"position": "none"})
    )
    for got, plain in ((q, plain_q), (k, plain_k)):
        np.testing.assert_array_equal(got[..., 4:], plain[..., 4:])
        np.testing.assert_array_equal(got[:, 0], plain[:, 0])
        assert (np.abs(got[..., :4] - plain[..., :4]).max(axis=(0, 1, 2)) > 1e-3).all()


def test_full_norm_has_one_mean_square_for_all_heads():
    mixer = made(qk_norm="full", position="none", kv_heads=1)
    q_BTHK, k_BTGK = mixer.queries_and_keys(inputs())
    assert (mixer.q_norm.g.shape, mixer.k_norm.g.shape) == ((24,), (12,))
    np.testing.assert_allclose(np.mean(q_BTHK**2, axis=(2, 3)), 1, atol=5e-3)
    np.testing.assert_allclose(np.mean(k_BTGK**2, axis=(2, 3)), 1, atol=5e-3)
    assert np.ptp(np.mean(q_BTHK**2, axis=3)) > 0.1


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rope_share": 0.25}, "rope_share=0.25"),  # three channels
        ({"rope_share": 0.3}, "rope_share=0.3"),  # no whole number of channels
        ({"rope_share": 0.0}, "rope_share=0.0"),
        ({"rope_share": 1.5}, "rope_share=1.5"),
        ({"rope_share": 0.5, "position": "none"}, "rope_share=0.5"),
        ({"qk_norm": "ful"}, "qk_norm"),
        ({"qk_norm": "full", "temperature": 0.5}, "temperature"),
    ],
)
def test_invalid_settings_are_refused(settings, name):
    with pytest.raises(UserError, match=f"^{name}"):
        made(**settings)


def test_output_matrix_may_keep_the_scale_of_other_matrices():
    scaled, plain = (jax.jit(lambda r=r: nnx.state(made(rescale_init=r)).out.w)() for r in (True, False))
    np.testing.assert_allclose(scaled[...] * 2**0.5, plain[...], rtol=1e-6)
