"""What the chunked recurrences share: the dtype of their sums, and carrying a state across chunks."""

from typing import Any

import jax.numpy as jnp

from kernels_pallas.state_scan.carry import carry_states
from seqjax.types import Array

__all__ = ["accumulator", "carry_states"]


def accumulator(*arrays: Array) -> Any:
    """The dtype of decays, states and sums: float32, or float64 for inputs that are."""
    return jnp.result_type(jnp.float32, *arrays)
