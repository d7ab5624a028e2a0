"""Helpers for layer tests."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

rng = np.random.default_rng(0)


def fill(module):
    """Set all parameters to random values, so an ignored gain or bias is detected."""
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable[...] = jnp.asarray(rng.standard_normal(variable[...].shape, np.float32))
    return module


def value(variable):
    return np.asarray(variable[...], np.float64)
