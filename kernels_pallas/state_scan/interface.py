"""Interface of the backends for chunk-start states."""

from typing import Protocol, runtime_checkable

import jax
from jax import Array


@runtime_checkable
class StateScan(Protocol):
    """Scans that return the state before each chunk and the last state.

    In reverse they return the state after each chunk, and the last state is the state before the first chunk.
    """

    def products(
        self,
        decay_cBHk: Array,
        p_cBHKK: Array,
        r_cBHKV: Array,
        s_BHKV: Array,
        *,
        precision: jax.lax.Precision,
        reverse: bool,
    ) -> tuple[Array, Array]:
        """Return (states [c, B, H, K, V], last [B, H, K, V]).

        `decay_cBHk` has K entries per head or one.
        """
        ...

    def elementwise(self, decay_Bc: Array, update_Bc: Array, initial_B: Array, *, reverse: bool) -> tuple[Array, Array]:
        """Return (states [B, c, ...], last [B, ...]).

        `decay_Bc` broadcasts against `update_Bc`, except on the chunk axis.
        """
        ...
