"""TTT-Linear: prompts in pieces, and invalid settings.

Values and gradients are in test_golden_ssm.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.errors import UserError


def made(dim=8, heads=2, **settings):
    return mixers.TTTLinear(dim, heads=heads, **settings, rngs=nnx.Rngs(0))


def test_pieces_equal_the_whole_sequence():
    """The pieces begin with a new mini-batch of 4, after two mini-batches, and within a mini-batch."""
    mixer, x_BTD = made(mini_batch=4), 30 * jax.random.normal(jax.random.key(1), (2, 17, 8))

    @jax.jit
    def both(x_BTD):
        cache, outputs = mixer.init_cache(2, 17, jnp.float32), []
        for piece_BTD in jnp.split(x_BTD, (8, 11), axis=1):
            y_BTD, cache = mixer.prefill_next(piece_BTD, cache)
            outputs.append(y_BTD)
        return jnp.concatenate(outputs, axis=1), mixer(x_BTD)

    got, want = both(x_BTD)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"heads": 3}, "heads=3"),
        ({"heads": 8}, "heads=8"),  # heads of width 1
        ({"heads": 0}, "heads"),
        ({"mini_batch": 0}, "mini_batch"),
        ({"base_lr": 0.0}, "base_lr=0.0"),
        ({"base_lr": float("nan")}, "base_lr=nan"),
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
        ({"conv_width": 0}, "conv_width"),
    ],
)
def test_invalid_settings_are_refused(settings, name):
    with pytest.raises(UserError, match=f"^{name}"):
        made(**settings)
