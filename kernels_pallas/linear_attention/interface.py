"""The interface of every backend of linear attention with a decay per channel."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

# A decay of e^-60 is negligible in float32; below it, differences of sums of log w would lose precision.
FLOOR = -60.0


def every_decay(log_w_BTHK: Array, like_BTHK: Array) -> Array:
    """Return log w from FLOOR on, of every token: a backend's gradient keeps the smaller array that was given."""
    return jnp.broadcast_to(jnp.maximum(log_w_BTHK, FLOOR), like_BTHK.shape)


@runtime_checkable
class LinearAttention(Protocol):
    """The recurrence, differentiable: the xla backend by JAX, the Triton kernels by a rule beside them."""

    def run(
        self,
        r_BTHK: Array,
        k_BTHK: Array,
        v_BTHV: Array,
        log_w_BTHK: Array,
        u_HK: Array | None,
        a_BTHK: Array | None,
        b_BTHK: Array | None,
        initial_BHKV: Array,
        *,
        chunk_size: int,
        min_log_w: float,
    ) -> tuple[Array, Array]:
        """Return (o_BTHV, the last state). Operands as in `api.linear_attention`; b is None without a too."""
        ...
