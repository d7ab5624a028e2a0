"""Interface of the backends for linear attention with a decay per key channel."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

from kernels_pallas.segments import RESET

# Smaller decays are exactly 0 in float32, and differences between larger sums of log w would lose precision.
FLOOR = RESET


def every_decay(log_w_BTHK: Array, like_BTHK: Array) -> Array:
    """Return log w, at least FLOOR and broadcast to every token.

    Under remat, as in the xla backend, the backward pass keeps only the smaller input.
    """
    return jnp.broadcast_to(jnp.maximum(log_w_BTHK, FLOOR), like_BTHK.shape)


@runtime_checkable
class LinearAttention(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

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
        """Return (o_BTHV, last state) for operands as in `api.linear_attention`.

        `b_BTHK` None with an `a_BTHK` means that b is k.
        """
        ...
