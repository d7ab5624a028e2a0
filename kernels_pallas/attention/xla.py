"""The `xla` backend of causal attention: dense.

It calls `jax.nn.dot_product_attention`, which materialises all scores.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from kernels_pallas.attention.documents import restarting_sum
from kernels_pallas.attention.interface import CausalAttention
from kernels_pallas.backend import Backend, Problem
from kernels_pallas.segments import first_tokens

# Longest sequence for which this backend is preferred to `chunked`: scores are small, and there is no loop to compile.
# On a CPU `chunked` was faster at every measured length (docs/kernels.md).
LONGEST = 256


def refusal(problem: Problem) -> str | None:
    """Refuse long sequences unless selected by name: `chunked` runs them."""
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
    log_f_BTH: Array | None = None,
    *,
    window: int,
    scale: float,
    slopes: tuple[float, ...],
    split: PartitionSpec | None = None,
    segments_BT: Array | None = None,
) -> Array:
    """Return o_BTHK; XLA shards the arrays by itself."""
    del split
    bias_BHTS = None
    if slopes:
        position_T = jnp.arange(q_BTHK.shape[1], dtype=jnp.float32)
        bias_BHTS = (jnp.asarray(slopes, jnp.float32)[:, None, None] * (position_T - position_T[:, None]))[None]
    if log_f_BTH is not None:
        log_f_BHT = jnp.moveaxis(log_f_BTH.astype(jnp.float32), 1, 2)
        if segments_BT is None:
            c_BHT = jnp.cumsum(log_f_BHT, axis=-1)
        else:
            c_BHT = restarting_sum(log_f_BHT, first_tokens(segments_BT)[:, None], axis=-1)
        decay_BHTS = c_BHT[..., None] - c_BHT[..., None, :]
        bias_BHTS = decay_BHTS if bias_BHTS is None else bias_BHTS + decay_BHTS
    mask_B1TS = None
    if segments_BT is not None:
        mask_B1TS = (segments_BT[:, :, None] == segments_BT[:, None])[:, None]
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BTGK,
        v_BTGK,
        bias=bias_BHTS,
        mask=mask_B1TS,
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="xla",
    )
