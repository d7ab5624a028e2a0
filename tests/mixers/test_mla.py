"""MLA: sizes, the absorbed form, and invalid settings.

Values and gradients of public layers are in test_golden_ssm.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.errors import UserError
from seqjax.nn.params import Template

T = 17


def made(dim=24, heads=3, **settings):
    return mixers.MLA(dim, heads=heads, **settings, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("settings", "n_params"),
    [
        ({}, 2_089_216),
        ({"gate": True}, 2_679_040),
        ({"gate": True, "q_rank": 384}, 2_531_968),
        ({"position": "none"}, 2_089_216),
    ],
)
def test_the_cache_holds_288_numbers_per_token_at_110m(settings, n_params):
    """A Transformer++ layer caches 1,536 numbers per token."""
    template = Template(lambda rngs, _: mixers.MLA(768, heads=12, **settings, rngs=rngs))
    assert sum(x.size for x in jax.tree.leaves(template.shapes)) == n_params
    cache = jax.eval_shape(lambda: template.bind(template.shapes).init_cache(2, 100, jnp.bfloat16))
    assert cache.latent_BS1C.shape == (2, 100, 1, 288)


@pytest.mark.parametrize("settings", [{}, {"position": "none", "gate": True, "q_rank": 5, "value_head_dim": 20}])
def test_absorbed_form_equals_expanded_keys(settings):
    """`prefill_next` with an empty cache attends to the latents, `__call__` to expanded keys and values."""
    mixer = made(**settings)
    x_BTD = jnp.asarray(np.random.default_rng(0).standard_normal((2, T, 24)), jnp.float32)

    @jax.jit
    def both(x_BTD):
        return mixer(x_BTD), mixer.prefill_next(x_BTD, mixer.init_cache(2, T, jnp.float32))[0]

    want, got = both(30 * x_BTD)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_rotation_depends_on_the_distance_of_tokens():
    """With equal tokens, q . k of all heads depends only on the distance, and differs between distances."""
    mixer = made(rope_base=7.0)
    x_BTD = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (24,)), (1, T, 24))
    q_BTHK, k_BTHK = jax.jit(mixer.queries_and_keys)(30 * x_BTD)
    scores_HTS = np.einsum("thk,shk->hts", q_BTHK[0], k_BTHK[0])
    np.testing.assert_allclose(scores_HTS[:, 3:, 3:], scores_HTS[:, :-3, :-3], rtol=1e-4, atol=1e-4)
    assert np.abs(scores_HTS[:, 0, 1] - scores_HTS[:, 0, 2]).min() > 1e-3


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"shared_dim": 3}, "shared_dim=3"),
        ({"kv_rank": 0}, "kv_rank"),
        ({"q_rank": -1}, "q_rank"),
        ({"heads": 5}, "heads=5"),
        ({"rope_base": 0.0}, "rope_base"),
    ],
)
def test_invalid_settings_are_refused(settings, name):
    with pytest.raises(UserError, match=f"^{name}"):
        made(**settings)
