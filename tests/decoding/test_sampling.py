"""Frequencies of sampled tokens for each sampling setting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.decoding import Sampling, sample
from seqjax.errors import UserError

P = np.array([0.15, 0.5, 0.05, 0.3])
N_DRAWN = 4000


def shares(**options) -> np.ndarray:
    rows = jnp.broadcast_to(jnp.log(jnp.asarray(P)), (N_DRAWN, 4))
    drawn = np.asarray(sample(rows, jax.random.key(0), **options))
    return np.bincount(drawn, minlength=4) / N_DRAWN


def renormalised(p, kept) -> np.ndarray:
    p = np.where(np.isin(np.arange(4), kept), p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, P),
        ({"temperature": 0.5}, renormalised(P**2, range(4))),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"top_k": 2}, renormalised(P, [1, 3])),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 0.6}, renormalised(P, [1, 3])),
        ({"top_p": 0.85}, renormalised(P, [0, 1, 3])),
        ({"top_p": 0.999}, P),
        # 0.68, 0.25, 0.06, 0.01 after the temperature: two tokens reach 0.9; before the temperature it takes three
        ({"top_p": 0.9, "temperature": 0.5}, renormalised(P**2, [1, 3])),
        # the first of the two tokens left by top_k has 0.625
        ({"top_p": 0.6, "top_k": 2}, [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_frequencies_follow_the_logits(options, want):
    np.testing.assert_allclose(shares(**options), want, atol=0.03)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.3}], ids=str)
def test_ties_with_the_last_kept_token_are_kept(options):
    rows = jnp.broadcast_to(jnp.array([1.0, 2.0, 2.0, 0.0]), (200, 4))
    assert set(np.asarray(sample(rows, jax.random.key(0), **options)).tolist()) == {1, 2}


def test_top_p_applies_per_row():
    rows = jnp.log(jnp.asarray([[0.9, 0.05, 0.05], [0.4, 0.3, 0.3]]))
    keys = jax.random.split(jax.random.key(0), 200)
    drawn = np.asarray(jax.vmap(lambda key: sample(rows, key, top_p=0.85))(keys))
    assert set(drawn[:, 0]) == {0}
    assert set(drawn[:, 1]) == {0, 1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"^temperature .*-0\.1"),
        ({"temperature": float("inf")}, r"^temperature"),
        ({"temperature": float("nan")}, r"^temperature"),
        ({"top_k": -1}, r"^top_k=-1 .*10"),
        ({"top_k": 11}, r"^top_k=11"),
        ({"top_p": 0.0}, r"^top_p=0\.0"),
        ({"top_p": 1.1}, r"^top_p=1\.1"),
        ({"top_p": float("nan")}, r"^top_p"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options).check(vocab_size=10)
