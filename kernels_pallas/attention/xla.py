"""The `xla` backend of causal attention, dense: `jax.nn.dot_product_attention` holds the scores of all pairs."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from kernels_pallas.attention.interface import CausalAttention
from kernels_pallas.backend import Backend, Problem

# Tokens per sequence up to which it is preferred to `chunked`, which is faster at every length measured on a CPU
# (docs/kernels.md): here the scores are small, and there is no loop to compile.
LONGEST = 256


def refusal(problem: Problem) -> str | None:
    """Leave long sequences to chunked attention, unless this one is named."""
    if problem.is_named or problem.operands[0].shape[1] <= LONGEST:
        return None
    return f"holds the scores of all pairs: above {LONGEST} tokens it runs only when selected by name"


def load() -> CausalAttention:
    """Return this module."""
    from kernels_pallas.attention import xla

    return xla


BACKEND = Backend("xla", load, refusal)


def attend(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    *,
    window: int,
    scale: float,
    slopes: tuple[float, ...],
    split: PartitionSpec | None = None,
) -> Array:
    """Return o_BTHK; XLA splits the arrays by itself."""
    del split
    bias_HTS = None
    if slopes:
        position_T = jnp.arange(q_BTHK.shape[1], dtype=jnp.float32)
        bias_HTS = jnp.asarray(slopes, jnp.float32)[:, None, None] * (position_T - position_T[:, None])
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BTGK,
        v_BTGK,
        bias=None if bias_HTS is None else bias_HTS[None],
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="xla",
    )
