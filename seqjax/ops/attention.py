"""Causal softmax attention, full or windowed, for training, prefill and decode.

    o_i = sum_j softmax_j(q_i . k_j * scale) v_j over 0 <= i - j < window

arXiv 2505.18522, section 2. A window of W includes the query's position, as in Mistral's `sliding_window`.
`kernels_pallas.causal_attention` chooses the backend for whole sequences: cuDNN, splash attention, all scores at once,
or chunks of scores.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

import kernels_pallas
from seqjax.sharding import heads_split
from seqjax.types import Array

GROUP = 256  # queries per group; bounds the scores that exist at once


def causal_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B T G K"],
    v_BSGV: Float[Array, "B T G V"],
    log_f_BTH: Float[Array, "B T H"] | None = None,
    *,
    segments: Int[Array, "B T"] | None = None,
    window: int = 0,
    scale: float | None = None,
    slopes: tuple[float, ...] = (),
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return causal attention, [B, T, H, V].

    `window=0` means all past keys. G key-value heads serve H query heads. `slopes`, one per query head, add ALiBi's
    -slope * (i - j) to the scaled scores in float32. `log_f_BTH`, float32 log forget gates, add their sum over
    positions j + 1 to i (FoX, arXiv 2503.02130). With `segments`, int32 numbers of the tokens' documents, a query reads
    only keys of its document.

    `implementation` is "cudnn", "triton", "splash", "xla" or "chunked". None selects the first that accepts the
    problem; the choice is recorded like the kernels' backends. An explicit implementation that cannot run the problem
    raises `kernels_pallas.BackendError`, a `ValueError`, with every implementation's reason.
    """
    return kernels_pallas.causal_attention(
        q_BTHK,
        k_BSGK,
        v_BSGV,
        log_f_BTH,
        segments=segments,
        window=window,
        scale=scale,
        slopes=slopes,
        split=heads_split(q_BTHK.shape[0], k_BSGK.shape[2]),
        implementation=implementation,
    )


def attention_step(
    q_BHK: Float[Array, "B H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    length: Int[Array, ""],
    bias_BSH: Float[Array, "B S H"] | None = None,
    *,
    scale: float | None = None,
    slopes: tuple[float, ...] = (),
) -> Float[Array, "B H V"]:
    """Return the attention of one query over the first `length` cache entries.

    The order of the entries matters only for ALiBi's `slopes`: position p is in slot p modulo the number of slots, and
    the query is at `length` - 1. `bias_BSH`, float32, is added to each key's scaled scores: FoX passes the sum of the
    log gates after the key.
    """
    n_batch, n_heads, head_dim = q_BHK.shape
    n_kv = k_BSGK.shape[2]
    factor = head_dim**-0.5 if scale is None else scale
    q_BGRK = q_BHK.reshape(n_batch, n_kv, n_heads // n_kv, head_dim)
    s_BGRS = jnp.einsum("bgrk,bsgk->bgrs", q_BGRK, k_BSGK, preferred_element_type=jnp.float32) * factor
    if slopes:
        distance_S = (length - 1 - jnp.arange(k_BSGK.shape[1])) % k_BSGK.shape[1]
        s_BGRS -= jnp.asarray(slopes, jnp.float32).reshape(n_kv, -1, 1) * distance_S
    if bias_BSH is not None:
        s_BGRS += jnp.moveaxis(bias_BSH, 1, 2).reshape(s_BGRS.shape)
    s_BGRS = jnp.where(jnp.arange(k_BSGK.shape[1]) < length, s_BGRS, -jnp.inf)
    p_BGRS = jax.nn.softmax(s_BGRS, axis=-1).astype(v_BSGV.dtype)
    return jnp.einsum("bgrs,bsgv->bgrv", p_BGRS, v_BSGV).reshape(n_batch, n_heads, -1)


def attention_at(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B S G K"],
    v_BSGV: Float[Array, "B S G V"],
    positions_T: Int[Array, "T"],
    positions_S: Int[Array, "S"],
    bias_BSH: Float[Array, "B S H"] | None = None,
    *,
    window: int = 0,
    scale: float | None = None,
    slopes: tuple[float, ...] = (),
) -> Float[Array, "B T H V"]:
    """Return causal attention for queries and keys at arbitrary positions.

    Keys at negative positions are masked. `bias_BSH`, float32, is added to each key's scaled scores. FoX passes the sum
    of log gates from the key to any common position, because a constant over a query's keys does not change its
    weights. All scores exist at once, float32 [B, H, T, S]. Options are as in `causal_attention`.
    """
    n_batch, n_new, n_heads, head_dim = q_BTHK.shape
    n_kv = k_BSGK.shape[2]
    factor = head_dim**-0.5 if scale is None else scale
    q_BTGRK = q_BTHK.reshape(n_batch, n_new, n_kv, n_heads // n_kv, head_dim)
    s_BGRTS = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK, preferred_element_type=jnp.float32) * factor
    distance_TS = positions_T[:, None] - positions_S
    if slopes:
        s_BGRTS -= jnp.asarray(slopes, jnp.float32).reshape(n_kv, -1, 1, 1) * distance_TS
    if bias_BSH is not None:
        s_BGRTS += jnp.moveaxis(bias_BSH, 1, 2).reshape(n_batch, n_kv, -1, 1, k_BSGK.shape[1])
    visible_TS = (positions_S >= 0) & (distance_TS >= 0)
    if window:
        visible_TS &= distance_TS < window
    p_BGRTS = jax.nn.softmax(jnp.where(visible_TS, s_BGRTS, -jnp.inf), axis=-1).astype(v_BSGV.dtype)
    return jnp.einsum("bgrts,bsgv->btgrv", p_BGRTS, v_BSGV).reshape(n_batch, n_new, n_heads, -1)


def in_groups(
    attend: Callable[[Float[Array, "B t H K"], Int[Array, "t"]], Float[Array, "B t H V"]],
    q_BTHK: Float[Array, "B T H K"],
    positions_T: Int[Array, "T"],
) -> Float[Array, "B T H V"]:
    """Attend in groups of `GROUP` queries to bound the score memory.

    `attend` maps a group of queries and its positions to the group's outputs, which are concatenated.
    """
    whole = q_BTHK.shape[1] // GROUP * GROUP
    parts = []
    if whole:
        groups = jnp.moveaxis(q_BTHK[:, :whole].reshape(len(q_BTHK), -1, GROUP, *q_BTHK.shape[2:]), 1, 0)
        o_nBGHV = lax.map(lambda piece: attend(*piece), (groups, positions_T[:whole].reshape(-1, GROUP)))
        parts.append(jnp.moveaxis(o_nBGHV, 0, 1).reshape(len(q_BTHK), whole, *o_nBGHV.shape[3:]))
    if whole < q_BTHK.shape[1]:
        parts.append(attend(q_BTHK[:, whole:], positions_T[whole:]))
    return jnp.concatenate(parts, axis=1)


def attention_entropy(
    q_BTHK: Float[Array, "B T H K"],
    k_BSGK: Float[Array, "B T G K"],
    log_f_BTH: Float[Array, "B T H"] | None = None,
    *,
    window: int = 0,
    scale: float | None = None,
    slopes: tuple[float, ...] = (),
    block: int = 128,
) -> Float[Array, "B T H"]:
    """Return the entropy of `causal_attention`'s weights in nats, float32 [B, T, H].

    It is computed as lse_i - sum_j p_ij s_ij over blocks of keys, hence at most T x `block` scores exist at once. The
    scan keeps the running maximum m, the sum l of e^(s - m), and u, the sum of e^(s - m) s. It is meant for
    measurements, not for training.
    """
    n_batch, seq_len, n_heads, head_dim = q_BTHK.shape
    factor = head_dim**-0.5 if scale is None else scale
    n_blocks = -(-seq_len // block)
    k_BSGK = jnp.pad(k_BSGK, ((0, 0), (0, n_blocks * block - seq_len), (0, 0), (0, 0)))
    k_BSHK = jnp.repeat(k_BSGK, n_heads // k_BSGK.shape[2], axis=2)
    k_cBCHK = jnp.moveaxis(k_BSHK.reshape(n_batch, n_blocks, block, n_heads, head_dim), 1, 0)
    i_T1 = jnp.arange(seq_len)[:, None]
    c_BHT, c_cBHC = None, None
    if log_f_BTH is not None:
        c_BHT = jnp.cumsum(jnp.moveaxis(log_f_BTH, 1, 2), axis=-1)
        c_BHS = jnp.pad(c_BHT, ((0, 0), (0, 0), (0, n_blocks * block - seq_len)))
        c_cBHC = jnp.moveaxis(c_BHS.reshape(n_batch, n_heads, n_blocks, block), 2, 0)

    def body(carry, xs):
        m_BHT, l_BHT, u_BHT = carry
        k_BCHK, start, c_BHC = xs
        distance_TC = i_T1 - (start + jnp.arange(block))
        s_BHTC = jnp.einsum("bthk,bchk->bhtc", q_BTHK, k_BCHK, preferred_element_type=jnp.float32) * factor
        if slopes:
            s_BHTC -= jnp.asarray(slopes, jnp.float32)[:, None, None] * distance_TC
        if c_BHT is not None:
            s_BHTC += c_BHT[..., None] - c_BHC[..., None, :]
        visible_TC = (distance_TC >= 0) & (distance_TC < (window or seq_len))
        s_BHTC = jnp.where(visible_TC, s_BHTC, 0.0)
        new_m_BHT = jnp.maximum(m_BHT, jnp.max(jnp.where(visible_TC, s_BHTC, -jnp.inf), axis=-1))
        # A query without a visible key so far has m = -inf in both maxima.
        base_BHT = jnp.where(jnp.isfinite(new_m_BHT), new_m_BHT, 0.0)
        e_BHTC = jnp.where(visible_TC, jnp.exp(s_BHTC - base_BHT[..., None]), 0.0)
        rescale_BHT = jnp.exp(m_BHT - base_BHT)
        l_BHT = l_BHT * rescale_BHT + e_BHTC.sum(-1)
        u_BHT = u_BHT * rescale_BHT + (e_BHTC * s_BHTC).sum(-1)
        return (new_m_BHT, l_BHT, u_BHT), None

    zeros_BHT = jnp.zeros((n_batch, n_heads, seq_len), jnp.float32)
    init = (zeros_BHT - jnp.inf, zeros_BHT, zeros_BHT)
    (m_BHT, l_BHT, u_BHT), _ = jax.lax.scan(body, init, (k_cBCHK, jnp.arange(n_blocks) * block, c_cBHC))
    return jnp.moveaxis(m_BHT + jnp.log(l_BHT) - u_BHT / l_BHT, 1, 2)
