"""Sparse attention with an index: choose keys, attend to them, and train the index.

An index gives each query one or several score rows I over its past keys. A row chooses keys for some query heads:

    S_t = the n keys s <= t with the largest I_ts; ties go to the earlier key
    o_t = sum_{s in S_t} softmax_s(q_t . k_s / sqrt(K)) v_s
    L   = mean_t KL(p_t || softmax_{S_t} I_t),  p_t = mean over the row's heads of the attention weights over S_t

No gradient flows through the choice. The loss L reaches only the index: dL/dI = (softmax_{S_t} I - p) / tokens
(DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

All functions process `GROUP` queries at a time, so the memory is linear in the length. Groups in the first part of a
sequence compute no scores of keys in later parts (`TIERS`). A choice of single keys is stored as bits, 32 keys per
integer.

Suffix letters in addition to the usual ones: X, score rows of a query; I, index heads; N, index width; t, queries in a
group, which see the first s keys; w, integers of 32 bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int, UInt32

from seqjax.ops.attention import GROUP
from seqjax.types import Array

# Index queries [B, t, ...] and index keys [B, S, N] to float32 scores [B, t, X, S].
Score = Callable[[Any, Array], Array]
# A group's choice, its positions [1, t] and a number of keys S to the chosen keys, bool [B, t, X, S].
Chosen = Callable[[Any, Array, int], Array]
TIERS = 4  # parts of a sequence; a later part computes scores of more keys, and each part is compiled separately
MASKED = -1e30  # finite, so differences of masked scores are finite


def dot_scores(q_BtXN: Float[Array, "B t X N"], k_BSN: Float[Array, "B S N"]) -> Float[Array, "B t X S"]:
    """Return the scores q . k / sqrt(N), one row per index head (MiniMax-M3)."""
    return q_BtXN.shape[-1] ** -0.5 * _products(q_BtXN, k_BSN)


def relu_scores(
    queries: tuple[Float[Array, "B t I N"], Float[Array, "B t I"]], k_BSN: Float[Array, "B S N"]
) -> Float[Array, "B t 1 S"]:
    """Return the scores sum_i w_i relu(q_i . k / sqrt(N)), one row for all heads (DeepSeek-V3.2).

    `queries` are q and w. Zeros have a positive sign, so equal scores have equal bits.
    """
    q_BtIN, w_BtI = queries
    s_BtIS = jax.nn.relu(q_BtIN.shape[-1] ** -0.5 * _products(q_BtIN, k_BSN))
    s_BtS = jnp.einsum("bti,btis->bts", w_BtI.astype(s_BtIS.dtype), s_BtIS, precision="highest")
    return jnp.where(s_BtS == 0, 0.0, s_BtS)[:, :, None]


def _products(q_BtIN: Array, k_BSN: Array) -> Array:
    # Full precision: near ties decide which keys are read, and a product of 16-bit operands is exact anyway.
    wide = _wide(q_BtIN)
    return jnp.einsum("btin,bsn->btis", q_BtIN, k_BSN, precision="highest", preferred_element_type=wide)


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


# -------------------------------------------------------------------------------------------------------------- choice
def largest(score_S: Float[Array, "*any S"], is_visible_S: Bool[Array, "*#any S"], n: int) -> Bool[Array, "*any S"]:
    """Mark the `n` largest visible scores, float32 or float64; all if there are fewer.

    Ties go to the lowest index. The n-th largest score is found bit by bit, because XLA cannot split `lax.top_k` over
    a batch on several devices.
    """
    if n >= score_S.shape[-1]:
        return jnp.broadcast_to(is_visible_S, score_S.shape)
    bits = 8 * score_S.dtype.itemsize
    unsigned = jnp.dtype(f"uint{bits}")
    top = jnp.array(1 << (bits - 1), unsigned)
    raw_S = lax.bitcast_convert_type(score_S, unsigned)
    # Unsigned integers in the order of the scores; 0 is below every score.
    key_S = jnp.where(raw_S & top != 0, ~raw_S, raw_S | top)
    key_S = jnp.where(is_visible_S, key_S, jnp.array(0, unsigned))

    def refine(i: Array, bound: Array) -> Array:
        higher = bound | (top >> i.astype(unsigned))
        return jnp.where((key_S >= higher[..., None]).sum(-1) >= n, higher, bound)

    bound_1 = lax.fori_loop(0, bits, refine, jnp.zeros(score_S.shape[:-1], unsigned))[..., None]
    is_above_S, is_equal_S = key_S > bound_1, key_S == bound_1
    left_1 = n - is_above_S.sum(-1, keepdims=True)
    return (is_above_S | (is_equal_S & (jnp.cumsum(is_equal_S, axis=-1) <= left_1))) & is_visible_S


def pack(is_chosen_S: Bool[Array, "*any S"]) -> UInt32[Array, "*any w"]:
    """Return bools as bits, 32 per integer."""
    padding = [(0, 0)] * (is_chosen_S.ndim - 1) + [(0, -is_chosen_S.shape[-1] % 32)]
    bit_w32 = jnp.pad(is_chosen_S, padding).reshape(*is_chosen_S.shape[:-1], -1, 32).astype(jnp.uint32)
    return (bit_w32 << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def unpack(bits_w: UInt32[Array, "*any w"], n_keys: int) -> Bool[Array, "*any S"]:
    """Return the first `n_keys` bits of `pack` as bools."""
    bit_w32 = (bits_w[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bit_w32.reshape(*bits_w.shape[:-1], -1)[..., :n_keys].astype(bool)


def choose_keys(
    score: Score, queries: Any, k_BSN: Float[Array, "B S N"], positions_T: Int[Array, "T"], n: int
) -> UInt32[Array, "B T w"]:
    """Return the bits of the `n` keys with the largest scores in the first row.

    The key at position s is in slot s, and a query at position t sees the keys up to t.
    """
    queries, k_BSN = lax.stop_gradient((queries, k_BSN))
    n_keys = k_BSN.shape[1]

    def choose(_: None, group: tuple[Any, Array], n_seen: int) -> tuple[None, Array]:
        is_visible_1tS = jnp.arange(n_seen) <= group[1][..., None]
        bits_Btw = pack(largest(score(group[0], k_BSN[:, :n_seen])[:, :, 0], is_visible_1tS, n))
        return None, jnp.pad(bits_Btw, ((0, 0), (0, 0), (0, -(-n_keys // 32) - bits_Btw.shape[2])))

    return scan_groups(choose, None, (queries, positions_T[None]), n_keys)[1]


def scan_groups(
    body: Callable[[Any, Any, int], tuple[Any, Any]], carry: Any, inputs: Any, n_keys: int
) -> tuple[Any, Any]:
    """Run `body(carry, group, n_seen) -> (carry, outputs)` over groups of `GROUP` queries, in order.

    Inputs and outputs have the time on axis 1, [B, T, ...] or [1, T, ...]. The last group may be shorter. The queries
    of a group see at most the first `n_seen` of `n_keys` keys. With as many queries as keys, the sequence is causal
    from its start, and each of its `TIERS` parts sees the keys up to the end of the part. Otherwise `n_seen` is
    `n_keys`.
    """
    length = jax.tree.leaves(inputs)[0].shape[1]
    n_groups = length // GROUP
    per_tier = -(-n_groups // TIERS) if length == n_keys else n_groups
    parts = []
    for first in range(0, n_groups, max(1, per_tier)):
        start, end = first * GROUP, min(first + per_tier, n_groups) * GROUP
        groups = jax.tree.map(
            lambda x, a=start, b=end: jnp.moveaxis(x[:, a:b].reshape(len(x), -1, GROUP, *x.shape[2:]), 1, 0), inputs
        )
        seen = end if length == n_keys else n_keys
        carry, outputs = lax.scan(functools.partial(_swapped, body, seen), carry, groups)
        parts.append(jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), outputs))
    if n_groups * GROUP < length:
        carry, outputs = body(carry, jax.tree.map(lambda x: x[:, n_groups * GROUP :], inputs), n_keys)
        parts.append(outputs)
    return carry, jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *parts)


def _swapped(body: Callable[[Any, Any, int], Any], n_seen: int, carry: Any, group: Any) -> Any:
    return body(carry, group, n_seen)


# ----------------------------------------------------------------------------------------------------------- attention
def _scores(q_BtHK: Array, k_BSGK: Array) -> Array:
    """Return the scaled scores in float32, [B, G, R, t, S]."""
    n_batch, n_queries, _, head_dim = q_BtHK.shape
    q_BtGRK = q_BtHK.reshape(n_batch, n_queries, k_BSGK.shape[2], -1, head_dim)
    return head_dim**-0.5 * jnp.einsum("btgrk,bsgk->bgrts", q_BtGRK, k_BSGK, preferred_element_type=_wide(q_BtHK))


@jax.custom_vjp
def chosen_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGK: Float[Array, "B S G K"],
    bits_BTw: UInt32[Array, "B T w"],
) -> Float[Array, "B T H K"]:
    """Return softmax attention to the keys in `bits_BTw` (`choose_keys`), the same keys for all heads.

    Every query needs a key. G key heads serve H query heads. Softmax and sums are float32. The backward pass computes
    the scores again.
    """
    return _attend(q_BTHK, k_BSGK, v_BSGK, bits_BTw)[0]


def _attend(q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, bits_BTw: Array) -> tuple[Array, tuple[Array, ...]]:
    def attend(_: None, group: tuple[Array, Array], n_seen: int) -> tuple[None, tuple[Array, Array]]:
        q_BtHK, bits_Btw = group
        is_read_B11tS = unpack(bits_Btw, n_seen)[:, None, None]
        s_BGRtS = jnp.where(is_read_B11tS, _scores(q_BtHK, k_BSGK[:, :n_seen]), -jnp.inf)
        lse_BGRt = jax.nn.logsumexp(s_BGRtS, axis=-1)
        p_BGRtS = jnp.exp(s_BGRtS - lse_BGRt[..., None]).astype(v_BSGK.dtype)
        o_BtGRK = jnp.einsum("bgrts,bsgk->btgrk", p_BGRtS, v_BSGK[:, :n_seen])
        return None, (o_BtGRK.reshape(q_BtHK.shape), jnp.moveaxis(lse_BGRt, 3, 1))

    _, (o_BTHK, lse_BTGR) = scan_groups(attend, None, (q_BTHK, bits_BTw), k_BSGK.shape[1])
    o_BTHK = checkpoint_name(o_BTHK, "attention_out")
    lse_BTGR = checkpoint_name(lse_BTGR, "attention_lse")
    return o_BTHK, (q_BTHK, k_BSGK, v_BSGK, bits_BTw, o_BTHK, lse_BTGR)


def _attend_backward(saved: tuple[Array, ...], do_BTHK: Array) -> tuple[Array, Array, Array, None]:
    q_BTHK, k_BSGK, v_BSGK, bits_BTw, o_BTHK, lse_BTGR = saved
    wide, n_kv = _wide(q_BTHK), k_BSGK.shape[2]
    options: Any = {"preferred_element_type": wide}

    def backward(sums: tuple[Array, Array], group: tuple[Array, ...], n_seen: int) -> tuple[tuple[Array, Array], Array]:
        dk_BSGK, dv_BSGK = sums
        k_BsGK, v_BsGK = k_BSGK[:, :n_seen], v_BSGK[:, :n_seen]
        q_BtHK, bits_Btw, lse_BtGR, o_BtHK, do_BtHK = group
        q_BtGRK, o_BtGRK, do_BtGRK = (x.reshape(*x.shape[:2], n_kv, -1, x.shape[-1]) for x in (q_BtHK, o_BtHK, do_BtHK))
        is_read_B11ts = unpack(bits_Btw, n_seen)[:, None, None]
        s_BGRts = jnp.where(is_read_B11ts, _scores(q_BtHK, k_BsGK), -jnp.inf)
        p_BGRts = jnp.exp(s_BGRts - jnp.moveaxis(lse_BtGR, 1, 3)[..., None])
        dv_BsGK = jnp.einsum("bgrts,btgrk->bsgk", p_BGRts.astype(v_BSGK.dtype), do_BtGRK, **options)
        dp_BGRts = jnp.einsum("btgrk,bsgk->bgrts", do_BtGRK, v_BsGK, **options)
        mean_BGRt = jnp.einsum("btgrk,btgrk->bgrt", do_BtGRK, o_BtGRK, **options)
        ds_BGRts = q_BtHK.shape[-1] ** -0.5 * p_BGRts * (dp_BGRts - mean_BGRt[..., None])
        ds_BGRts = ds_BGRts.astype(q_BtHK.dtype)
        dk_BsGK = jnp.einsum("bgrts,btgrk->bsgk", ds_BGRts, q_BtGRK, **options)
        dq_BtGRK = jnp.einsum("bgrts,bsgk->btgrk", ds_BGRts, k_BsGK)
        sums = dk_BSGK.at[:, :n_seen].add(dk_BsGK), dv_BSGK.at[:, :n_seen].add(dv_BsGK)
        return sums, dq_BtGRK.reshape(q_BtHK.shape)

    zeros = (jnp.zeros(k_BSGK.shape, wide), jnp.zeros(v_BSGK.shape, wide))
    sums, dq_BTHK = scan_groups(backward, zeros, (q_BTHK, bits_BTw, lse_BTGR, o_BTHK, do_BTHK), k_BSGK.shape[1])
    return dq_BTHK, sums[0].astype(k_BSGK.dtype), sums[1].astype(v_BSGK.dtype), None


chosen_attention.defvjp(_attend, _attend_backward)


# ---------------------------------------------------------------------------------------------------------------- loss
def index_loss(
    score: Score,
    is_chosen: Chosen,
    queries: Any,
    k_BSN: Float[Array, "B S N"],
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    choice: Any,
) -> Float[Array, ""]:
    """Return the mean divergence of the index from the attention weights, in nats.

    It is KL(p || softmax I) over the chosen keys, averaged over tokens and score rows. Row x serves H / X consecutive
    heads; p is the mean of their attention weights over the chosen keys.

    Args:
        score: Maps index queries and keys to scores, such as `dot_scores`.
        is_chosen: Maps a group of `choice`, its positions [1, t] and a number of keys S to a mask [B, t, X, S].
        queries: Index queries, arrays [B, T, ...]. Only these and `k_BSN` receive gradients.
        k_BSN: Index keys.
        q_BTHK: Queries of the attention.
        k_BSGK: Keys of the attention.
        choice: Arrays [B, T, ...].

    The gradient is computed in the forward pass, so the scores are not computed again.
    """
    q_BTHK, k_BSGK, choice = lax.stop_gradient((q_BTHK, k_BSGK, choice))
    loss: Any = _loss(score, is_chosen, queries, k_BSN, q_BTHK, k_BSGK, choice)
    return loss


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(
    score: Score, is_chosen: Chosen, queries: Any, k_BSN: Array, q_BTHK: Array, k_BSGK: Array, choice: Any
) -> Array:
    return _loss_forward(score, is_chosen, queries, k_BSN, q_BTHK, k_BSGK, choice)[0]


def _loss_forward(
    score: Score, is_chosen: Chosen, queries: Any, k_BSN: Array, q_BTHK: Array, k_BSGK: Array, choice: Any
) -> tuple[Array, tuple[Any, Array]]:
    n_batch, length = q_BTHK.shape[:2]
    wide = _wide(q_BTHK)

    def add(sums: tuple[Array, Array], group: tuple[Any, ...], n_seen: int) -> tuple[tuple[Array, Array], Any]:
        queries_t, q_BtHK, choice_t, position_1t = group
        i_BtXS, pull = jax.vjp(score, queries_t, k_BSN[:, :n_seen])
        n_rows = i_BtXS.shape[2]
        i_BXtS, is_read_BXtS = (jnp.moveaxis(x, 2, 1) for x in (i_BtXS, is_chosen(choice_t, position_1t, n_seen)))
        s_BGRtS = _scores(q_BtHK, k_BSGK[:, :n_seen])
        s_BXRtS = s_BGRtS.reshape(n_batch, n_rows, -1, *s_BGRtS.shape[3:])
        # Exactly 0 at masked keys, because every query has a chosen key.
        p_BXtS = jax.nn.softmax(jnp.where(is_read_BXtS[:, :, None], s_BXRtS, MASKED), axis=-1).mean(2)
        log_r_BXtS = jax.nn.log_softmax(jnp.where(is_read_BXtS, i_BXtS, MASKED), axis=-1)
        r_BXtS = jnp.exp(log_r_BXtS)
        log_p_BXtS = jnp.log(jnp.where(p_BXtS > 0, p_BXtS, 1.0))  # 0 log 0 = 0
        n_terms = n_batch * length * n_rows
        total = sums[0] + jnp.where(p_BXtS > 0, p_BXtS * (log_p_BXtS - log_r_BXtS), 0.0).sum() / n_terms
        d_queries_t, dk_BSN = pull(jnp.moveaxis((r_BXtS - p_BXtS) / n_terms, 1, 2).astype(i_BtXS.dtype))
        return (total, sums[1].at[:, :n_seen].add(dk_BSN.astype(wide))), d_queries_t

    zeros = (jnp.zeros((), wide), jnp.zeros(k_BSN.shape, wide))
    inputs = (queries, q_BTHK, choice, jnp.arange(length)[None])
    (total, dk_BSN), d_queries = scan_groups(add, zeros, inputs, k_BSN.shape[1])
    return total, checkpoint_name((d_queries, dk_BSN.astype(k_BSN.dtype)), "index_gradients")


def _loss_backward(score: Score, is_chosen: Chosen, saved: tuple[Any, Array], g: Array) -> tuple[Any, ...]:
    del score, is_chosen
    d_queries, dk_BSN = jax.tree.map(lambda x: (g * x).astype(x.dtype), saved)
    return d_queries, dk_BSN, None, None, None


_loss.defvjp(_loss_forward, _loss_backward)
