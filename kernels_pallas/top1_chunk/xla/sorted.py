"""Attention to selected chunks with queries sorted by chunk, for long sequences.

The work is T C K (remote: k times that) instead of T^2 K. Two passes and a merge give one joint softmax:

    remote   per block of rows that selected the same chunk (xla_sort_plan.py): gather the rows of q, multiply them with
             the chunk's keys, (o, lse) per slot; each row then fetches one result per selected chunk
    local    per chunk: causal attention inside it, (o, lse) per row
    merge    lse = logaddexp(remote, local),  o = exp(lse_r - lse) o_r + exp(lse_l - lse) o_l, one chunk at a time

The backward pass runs the same two passes with p = exp(s - lse) (formulas in masked.py). Rows fetch dq by slot, and a
block's dk and dv are added to its chunk. Both passes scan over groups of blocks, and one group of scores exists at a
time. Memory is O(T), and O(k T) for the slots.

With packed documents, `start_B1M` is the first token of each row's document. In the local pass a row reads keys from it
on. All rows that selected a chunk are in its last document, so the remote pass reads the same keys for all of them.
"""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.numerics import MASKED, accumulation_dtype
from kernels_pallas.xla_sort_plan import from_blocks, in_blocks, make_plan, scan_blocks, take


def forward(
    q_BGMK: Array,
    k_BGSK: Array,
    v_BGSV: Array,
    sel_BGMk: Array,
    *,
    chunk_size: int,
    heads_per_group: int,
    scale: float,
    start_B1M: Array | None = None,
) -> tuple[Array, Array]:
    """Return (o_BGMV, lse_BGM), both in the accumulation dtype."""
    acc = accumulation_dtype(q_BGMK, k_BGSK, v_BGSV)
    M, C, R = q_BGMK.shape[2], chunk_size, heads_per_group
    k_BGcCK, v_BGcCV = in_blocks(k_BGSK, C), in_blocks(v_BGSV, C)

    def attend(q_BGnrK, k_BGnCK, v_BGnCV, is_seen):
        s_BGnrC = scale * _dot("bgnrk,bgnsk->bgnrs", q_BGnrK, k_BGnCK, acc)
        s_BGnrC = jnp.where(is_seen, s_BGnrC, MASKED)
        m_BGnr = s_BGnrC.max(-1)
        p_BGnrC = jnp.exp(s_BGnrC - m_BGnr[..., None])
        l_BGnr = p_BGnrC.sum(-1)
        o_BGnrV = _dot("bgnrs,bgnsv->bgnrv", p_BGnrC.astype(v_BGnCV.dtype), v_BGnCV, acc)
        return o_BGnrV / l_BGnr[..., None], m_BGnr + jnp.log(l_BGnr)

    def local(carry, q_BGnrK, k_BGnCK, v_BGnCV, *begin_B1nr):
        return carry, attend(q_BGnrK, k_BGnCK, v_BGnCV, _is_local(C, R, *begin_B1nr))

    begins = _begins(start_B1M, C, R)
    _, (o_BGcrV, lse_BGcr) = scan_blocks(local, None, C, in_blocks(q_BGMK, C * R), k_BGcCK, v_BGcCV, *begins)
    o_BGMV, lse_BGM = from_blocks(o_BGcrV, M), from_blocks(lse_BGcr, M)
    plan = make_plan(sel_BGMk, k_BGcCK.shape[2], C, R)
    if plan is None:
        return o_BGMV, lse_BGM

    def remote(carry, row_BGnr, chunk_BGn):
        k_BGnCK, v_BGnCV = take(k_BGcCK, chunk_BGn), take(v_BGcCV, chunk_BGn)
        return carry, attend(take(q_BGMK, row_BGnr), k_BGnCK, v_BGnCV, _is_readable(chunk_BGn, C, *begins))

    _, (remote_o_BGnrV, remote_lse_BGnr) = scan_blocks(remote, None, C, plan.row_BGnr, plan.chunk_BGn)
    remote_o_BGSV, remote_lse_BGS = from_blocks(remote_o_BGnrV), from_blocks(remote_lse_BGnr)
    for rank in range(plan.slot_BGMk.shape[-1]):
        slot_BGM = plan.slot_BGMk[..., rank]
        remote_o_BGMV, remote_lse_BGM = take(remote_o_BGSV, slot_BGM), take(remote_lse_BGS, slot_BGM, fill=MASKED)
        joint_BGM = jnp.logaddexp(lse_BGM, remote_lse_BGM)
        o_BGMV = jnp.exp(lse_BGM - joint_BGM)[..., None] * o_BGMV
        o_BGMV += jnp.exp(remote_lse_BGM - joint_BGM)[..., None] * remote_o_BGMV
        lse_BGM = joint_BGM
    return o_BGMV, lse_BGM


def backward(
    q_BGMK: Array,
    k_BGSK: Array,
    v_BGSV: Array,
    sel_BGMk: Array,
    lse_BGM: Array,
    D_BGM: Array,
    do_BGMV: Array,
    *,
    chunk_size: int,
    heads_per_group: int,
    scale: float,
    start_B1M: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return (dq_BGMK, dk_BGSK, dv_BGSV) in the accumulation dtype."""
    acc = accumulation_dtype(q_BGMK, k_BGSK, v_BGSV)
    M, S, C, R = q_BGMK.shape[2], k_BGSK.shape[2], chunk_size, heads_per_group
    k_BGcCK, v_BGcCV = in_blocks(k_BGSK, C), in_blocks(v_BGSV, C)

    def grads(q_BGnrK, lse_BGnr, D_BGnr, do_BGnrV, k_BGnCK, v_BGnCV, is_seen):
        s_BGnrC = scale * _dot("bgnrk,bgnsk->bgnrs", q_BGnrK, k_BGnCK, acc)
        p_BGnrC = jnp.where(is_seen, jnp.exp(s_BGnrC - lse_BGnr[..., None]), 0)
        dp_BGnrC = _dot("bgnrv,bgnsv->bgnrs", do_BGnrV, v_BGnCV, acc)
        ds_BGnrC = (scale * p_BGnrC * (dp_BGnrC - D_BGnr[..., None])).astype(k_BGnCK.dtype)
        dq_BGnrK = _dot("bgnrs,bgnsk->bgnrk", ds_BGnrC, k_BGnCK, acc)
        dk_BGnCK = _dot("bgnrs,bgnrk->bgnsk", ds_BGnrC, q_BGnrK, acc)
        dv_BGnCV = _dot("bgnrs,bgnrv->bgnsv", p_BGnrC.astype(do_BGnrV.dtype), do_BGnrV, acc)
        return dq_BGnrK, dk_BGnCK, dv_BGnCV

    def local(carry, q_BGnrK, lse_BGnr, D_BGnr, do_BGnrV, k_BGnCK, v_BGnCV, *begin_B1nr):
        return carry, grads(q_BGnrK, lse_BGnr, D_BGnr, do_BGnrV, k_BGnCK, v_BGnCV, _is_local(C, R, *begin_B1nr))

    # rows that pad the last chunk have do = 0 and D = 0: they add nothing for any probabilities
    rows = tuple(in_blocks(x, C * R) for x in (q_BGMK, lse_BGM, D_BGM, do_BGMV))
    begins = _begins(start_B1M, C, R)
    _, (dq_BGcrK, dk_BGcCK, dv_BGcCV) = scan_blocks(local, None, C, *rows, k_BGcCK, v_BGcCV, *begins)
    dq_BGMK = from_blocks(dq_BGcrK, M)
    plan = make_plan(sel_BGMk, k_BGcCK.shape[2], C, R)
    if plan is not None:

        def remote(carry, row_BGnr, chunk_BGn):
            q_BGnrK, D_BGnr, do_BGnrV = (take(x, row_BGnr) for x in (q_BGMK, D_BGM, do_BGMV))
            lse_BGnr = take(lse_BGM, row_BGnr, fill=jnp.inf)  # an empty slot has p = exp(s - inf) = 0
            k_BGnCK, v_BGnCV = take(k_BGcCK, chunk_BGn), take(v_BGcCV, chunk_BGn)
            is_seen = _is_readable(chunk_BGn, C, *begins)
            dq_BGnrK, *dkv = grads(q_BGnrK, lse_BGnr, D_BGnr, do_BGnrV, k_BGnCK, v_BGnCV, is_seen)
            return tuple(_add_at(x, chunk_BGn, y) for x, y in zip(carry, dkv, strict=True)), dq_BGnrK

        (dk_BGcCK, dv_BGcCV), remote_dq = scan_blocks(remote, (dk_BGcCK, dv_BGcCV), C, plan.row_BGnr, plan.chunk_BGn)
        for rank in range(plan.slot_BGMk.shape[-1]):
            dq_BGMK += take(from_blocks(remote_dq), plan.slot_BGMk[..., rank])
    return dq_BGMK, from_blocks(dk_BGcCK, S), from_blocks(dv_BGcCV, S)


def _begins(start_B1M: Array | None, C: int, R: int) -> tuple[Array, ...]:
    """Return the first key of each row's document, counted from the chunk's start.

    The shape is [B, 1, c, R C]. Without documents, return (). Rows that pad the last chunk repeat its last row.
    """
    if start_B1M is None:
        return ()
    start_B1M = jnp.pad(start_B1M, ((0, 0), (0, 0), (0, -start_B1M.shape[2] % (C * R))), mode="edge")
    start_B1cr = in_blocks(start_B1M, C * R)
    return (start_B1cr - C * jnp.arange(start_B1cr.shape[2])[:, None],)


def _is_local(C: int, R: int, begin_B1nr: Array | None = None) -> Array:
    """Return [R C, C]: whether key s of the chunk is not after row r; with documents [B, 1, n, R C, C]."""
    is_causal_rC = jnp.arange(C) <= (jnp.arange(R * C) // R)[:, None]
    return is_causal_rC if begin_B1nr is None else is_causal_rC & (jnp.arange(C) >= begin_B1nr[..., None])


def _is_readable(chunk_BGn: Array, C: int, begin_B1cr: Array | None = None) -> Array | bool:
    """Return whether the rows that selected the chunks read their keys: True, or [B, G, n, 1, C] with documents."""
    if begin_B1cr is None:
        return True
    begin_B1c = begin_B1cr[..., -1]  # of the chunk's last row
    begin_BGc = jnp.broadcast_to(begin_B1c, (*chunk_BGn.shape[:2], begin_B1c.shape[2]))
    return jnp.arange(C) >= take(begin_BGc, chunk_BGn)[..., None, None]


def _add_at(x: Array, index: Array, update: Array) -> Array:
    """Return x after x[b, g, index[b, g, n]] += update[b, g, n]."""
    return jax.vmap(jax.vmap(lambda x, i, u: x.at[i].add(u)))(x, index, update)


def _dot(spec: str, a: Array, b: Array, acc: jnp.dtype) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=acc)
