"""Interface of the backends for KDA and Gated DeltaNet-2."""

from typing import Protocol, runtime_checkable

from jax import Array


@runtime_checkable
class Kda(Protocol):
    """Differentiable backend: xla by autodiff, the Triton kernels by a custom VJP."""

    def run(
        self,
        q_BTHK: Array,
        k_BTHK: Array,
        v_BTHV: Array,
        decay_BTHK: Array,
        beta: Array,
        rate_H: Array,
        bias_HK: Array,
        initial_BHKV: Array,
        *,
        lower_bound: float | None,
        chunk_size: int,
    ) -> tuple[Array, Array]:
        """Return (o_BTHV, last state) for operands as in `api.kda`.

        `beta` is [B, T, H] in float32 or wider, or [B, T, H, K] in the dtype of v. Rates, biases and the initial state
        are float32 or wider.
        """
        ...
