"""The interface of every backend of the states at chunk starts."""

from typing import Protocol, runtime_checkable

import jax
from jax import Array


@runtime_checkable
class StateScan(Protocol):
    """Both forms return the state before each chunk (in reverse: after each chunk) and the state after the last."""

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
        """Return (states [c, B, H, K, V], last [B, H, K, V]); `decay` has K entries per head, or one."""
        ...

    def elementwise(self, decay_Bc: Array, update_Bc: Array, initial_B: Array, *, reverse: bool) -> tuple[Array, Array]:
        """Return (states [B, c, ...], last [B, ...]); `decay` broadcasts against `update` but on the chunks' axis."""
        ...
