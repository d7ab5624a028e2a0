"""The `xla` backend of the index loss: dense scores of `GROUP` queries at a time.

Memory is linear in T. The groups are in `TIERS` parts of the sequence; a part computes scores of the keys up to its
end, and each part is compiled separately.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.backend import Backend
from kernels_pallas.batching import varying_with
from kernels_pallas.index_loss.interface import IndexLoss
from kernels_pallas.numerics import MASKED, accumulation_dtype

GROUP, TIERS = 256, 4


def load() -> IndexLoss:
    """Return this module."""
    from kernels_pallas.index_loss import xla

    return xla


BACKEND = Backend("xla", load)


def run(
    index_q_BTGN: Array,
    index_k_BTN: Array,
    q_BTHK: Array,
    k_BTGK: Array,
    sel_BTGn: Array,
    *,
    block_size: int,
    with_gradients: bool,
) -> tuple[Array, ...]:
    """Return the loss, and with gradients also those of the index queries and keys."""
    length, wide = q_BTHK.shape[1], accumulation_dtype(q_BTHK)
    operands = (index_q_BTGN, q_BTHK, sel_BTGn, jnp.arange(length)[None])
    sums = varying_with(operands[:3], (jnp.zeros((), wide), jnp.zeros(index_k_BTN.shape, wide)))
    n_groups, n_terms = length // GROUP, math.prod(index_q_BTGN.shape[:3])
    per_tier, parts = max(1, -(-n_groups // TIERS)), []
    for first in range(0, n_groups, per_tier):
        start, end = first * GROUP, min(first + per_tier, n_groups) * GROUP
        groups = [jnp.moveaxis(x[:, start:end].reshape(len(x), -1, GROUP, *x.shape[2:]), 1, 0) for x in operands]
        body = functools.partial(_add, index_k_BTN[:, :end], k_BTGK[:, :end], block_size, n_terms)
        sums, dq_ntGN = lax.scan(body, sums, tuple(groups))
        parts.append(jnp.moveaxis(dq_ntGN, 0, 1).reshape(len(q_BTHK), -1, *dq_ntGN.shape[3:]))
    if n_groups * GROUP < length:
        rest = tuple(x[:, n_groups * GROUP :] for x in operands)
        sums, dq_BtGN = _add(index_k_BTN, k_BTGK, block_size, n_terms, sums, rest)
        parts.append(dq_BtGN)
    total, dk_BTN = sums
    return (total, jnp.concatenate(parts, axis=1), dk_BTN.astype(index_k_BTN.dtype))[: 3 if with_gradients else 1]


def _add(
    index_k_BSN: Array, k_BSGK: Array, C: int, n_terms: int, sums: tuple[Array, Array], group: tuple[Array, ...]
) -> tuple[tuple[Array, Array], Array]:
    """Add a group of queries to the loss and to dk; return these sums and the group's dq."""
    index_q_BtGN, q_BtHK, sel_BtGn, position_1t = group
    n_keys, wide = index_k_BSN.shape[1], accumulation_dtype(q_BtHK)
    i_BGtS, pull = jax.vjp(_index_scores, index_q_BtGN, index_k_BSN)
    is_read_BGtS = jnp.moveaxis(_is_read(sel_BtGn, position_1t, n_keys, C), 2, 1)
    q_BtGRK = q_BtHK.reshape(*q_BtHK.shape[:2], k_BSGK.shape[2], -1, q_BtHK.shape[3])
    s_BGRtS = jnp.einsum("btgrk,bsgk->bgrts", q_BtGRK, k_BSGK, preferred_element_type=wide)
    s_BGRtS = q_BtHK.shape[3] ** -0.5 * s_BGRtS
    # Exactly 0 at masked keys, because every query reads its own key.
    p_BGtS = jax.nn.softmax(jnp.where(is_read_BGtS[:, :, None], s_BGRtS, MASKED), axis=-1).mean(2)
    log_r_BGtS = jax.nn.log_softmax(jnp.where(is_read_BGtS, i_BGtS, MASKED), axis=-1)
    log_p_BGtS = jnp.log(jnp.where(p_BGtS > 0, p_BGtS, 1.0))  # 0 log 0 = 0
    total = sums[0] + jnp.where(p_BGtS > 0, p_BGtS * (log_p_BGtS - log_r_BGtS), 0.0).sum() / n_terms
    dq_BtGN, dk_BSN = pull(((jnp.exp(log_r_BGtS) - p_BGtS) / n_terms).astype(i_BGtS.dtype))
    return (total, sums[1].at[:, :n_keys].add(dk_BSN.astype(wide))), dq_BtGN


def _index_scores(q_BtGN: Array, k_BSN: Array) -> Array:
    # Full precision, as in the selection: a product of 16-bit operands is exact anyway.
    wide = accumulation_dtype(q_BtGN)
    i_BtGS = jnp.einsum("btgn,bsn->btgs", q_BtGN, k_BSN, precision="highest", preferred_element_type=wide)
    return jnp.moveaxis(q_BtGN.shape[-1] ** -0.5 * i_BtGS, 2, 1)


def _is_read(sel_BtGn: Array, position_1t: Array, n_keys: int, C: int) -> Array:
    """Return whether a query reads a key, bool [B, t, G, S]: past keys of the local and the chosen blocks."""
    block_c, own_1t1 = jnp.arange(-(-n_keys // C)), position_1t[..., None] // C
    is_read_BtGc = (sel_BtGn[..., None] == block_c).any(-2) | (block_c == own_1t1)[:, :, None]
    is_past_1t1S = (jnp.arange(n_keys) <= position_1t[..., None])[:, :, None]
    return jnp.repeat(is_read_BtGc, C, axis=-1)[..., :n_keys] & is_past_1t1S
