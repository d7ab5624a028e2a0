"""What the chunked recurrences share: the dtype of their sums."""

from typing import Any

import jax.numpy as jnp

from seqjax.types import Array


def accumulator(*arrays: Array) -> Any:
    """The dtype of decays, states and sums: float32, or float64 for inputs that are."""
    return jnp.result_type(jnp.float32, *arrays)
