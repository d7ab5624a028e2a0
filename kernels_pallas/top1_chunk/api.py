"""Top-1 Chunk attention, differentiable, with interchangeable backends.

    sel = stop_gradient(select(q, k));  o = softmax over {selected chunk} and {local chunk up to the query}

With packed documents, every query reads keys of its document only (select_chunk/documents.py).

With top_k, the softmax is over the k past chunks with the largest scores and the local chunk. MoBA (arXiv 2502.13189)
is "approx"; its k also counts the local chunk, so top_k = k - 1.

As in the paper (arXiv 2505.18522), the selection has no gradient: q and k learn from the softmax over the keys that
were read. The forward rule gives the residuals the checkpoint names `top1_selection` (int32), `attention_out` and
`attention_lse`. If a rematerialisation policy saves these names, the backward pass does not repeat the quadratic
selection. Reverse mode only, once: neither `jvp` nor a second derivative is defined.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from kernels_pallas import backend, numerics, validation
from kernels_pallas.segments import check_segments
from kernels_pallas.select_chunk import api as select_api
from kernels_pallas.select_chunk import documents
from kernels_pallas.select_chunk.interface import ChunkSelection
from kernels_pallas.select_chunk.tables import Shortlist
from kernels_pallas.top1_chunk import triton, xla
from kernels_pallas.top1_chunk.interface import ChunkAttention

BACKENDS = (triton.BACKEND, xla.BACKEND)


class Call(NamedTuple):
    """The static arguments of a call: kernels and numbers."""

    selector: ChunkSelection
    attention: ChunkAttention
    chunk_size: int
    selection: str
    scale: float
    top_k: int = 1
    shortlist: Shortlist | None = None


def top1_chunk_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    segments: Int32[Array, "B T"] | None = None,
    chunk_size: int = 128,
    selection: str = "exact",
    top_k: int = 1,
    shortlist: int = 4,
    table: str = "mean",
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return causal attention over the local chunk and the selected past chunks.

    Args:
      q_BTHK: queries, fp32, bf16 or fp16 (fp64 under x64); any T >= 1.
      k_BTGK: keys; G divides H, query head h reads key-value head h // (H // G).
      v_BTGV: values.
      segments: number of each token's document, not decreasing along time; None means one document. A query selects
        among the past chunks that end in its document, and reads keys of its document only. No output or gradient of a
        document depends on another document.
      chunk_size: keys per chunk, C.
      selection: "exact" (largest softmax mass), "best_key" (largest single score), "best_key_int8" (best_key with
        queries and keys rounded to 8 bits), "shortlist" (best_key among the chunks that lead a table), "approx"
        (largest q . mean key) or "random" (the same past chunks for any q and k: a control). Each head selects
        separately.
      top_k: past chunks that a query reads; all if there are fewer.
      shortlist: for "shortlist", as in `select_chunk`.
      table: for "shortlist": "mean", "sub_means" or "mean_eigen".
      scale: factor of the scores; 1 / sqrt(K) when None.
      implementation: None picks the best backend that can run this; a name selects that backend or raises an error.

    Returns:
      o_BTHV in v's dtype. Scores, softmax and sums are fp32.

    Raises:
      ValueError: shapes that disagree, and settings that `select_chunk` refuses.
      BackendError: (a ValueError) the selected implementation cannot run this.

    Source: arXiv 2505.18522, Top-1 Chunk (Exact and Approx.).
    """
    validation.check_attention(q_BTHK.shape, k_BTGK.shape, v_BTGV.shape)
    check_segments(segments, *q_BTHK.shape[:2])
    options = select_api.checked_options(chunk_size, selection, top_k, shortlist, table)
    problem = options | select_api.has_segments(segments)
    call = Call(
        select_api.pick_backend(q_BTHK, k_BTGK, problem, implementation),
        backend.pick("top1_chunk_attention", BACKENDS, implementation, (q_BTHK, k_BTGK, v_BTGV), problem),
        chunk_size,
        selection,
        numerics.softmax_scale(scale, q_BTHK.shape[-1]),
        min(top_k, max(1, (q_BTHK.shape[1] - 1) // chunk_size)),  # no query has more past chunks
        options.get("shortlist"),
    )
    if segments is None:
        return attend(q_BTHK, k_BTGK, v_BTGV, call)
    sel_BTH = _select(*jax.lax.stop_gradient((q_BTHK, k_BTGK)), call, segments)
    return _attend_selected(q_BTHK, k_BTGK, v_BTGV, sel_BTH, segments, call.attention, call.chunk_size, call.scale)


def selected_chunk_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    sel_BTSk: Int32[Array, "B T S k"],
    *,
    segments: Int32[Array, "B T"] | None = None,
    chunk_size: int,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return causal attention over the local chunk and the past chunks `sel_BTSk`.

    One softmax covers all keys. `top1_chunk_attention` does the same with its selection; use this op for another
    selection rule, such as NSA's (arXiv 2502.11089).

    Args:
      q_BTHK: queries, fp32, bf16 or fp16 (fp64 under x64); any T >= 1.
      k_BTGK: keys; G divides H, query head h reads key-value head h // (H // G).
      v_BTGV: values.
      sel_BTSk: chunks for each query: all different, before the local chunk, padded with -1. Not checked. Each head has
        a selection, S = H, or the query heads of a key-value head share it, S = G.
      segments: as in `top1_chunk_attention`. Chunks that do not end in the query's document count as -1.
      chunk_size: keys per chunk.
      scale: factor of the scores; 1 / sqrt(K) when None.
      implementation: as in `top1_chunk_attention`.

    Returns:
      o_BTHV in v's dtype. Scores, softmax and sums are fp32. The residuals have the same checkpoint names as in
      `top1_chunk_attention`.

    Raises:
      ValueError: shapes that disagree, or a chunk_size below 1.
      BackendError: (a ValueError) the selected implementation cannot run this.
    """
    validation.check_attention(q_BTHK.shape, k_BTGK.shape, v_BTGV.shape)
    validation.check_chunk_size(chunk_size)
    check_segments(segments, *q_BTHK.shape[:2])
    is_shared = sel_BTSk.shape[2] == k_BTGK.shape[2]
    validation.check_per_head(
        "sel, without its last axis,", sel_BTSk.shape[:3], k_BTGK.shape if is_shared else q_BTHK.shape
    )
    operands = q_BTHK, k_BTGK, v_BTGV
    options = {"chunk_size": chunk_size, "top_k": sel_BTSk.shape[3]} | select_api.has_segments(segments)
    attention = backend.pick("top1_chunk_attention", BACKENDS, implementation, operands, options)
    if segments is not None:
        first_BT = documents.starts(segments) // chunk_size
        sel_BTSk = jnp.where(sel_BTSk >= first_BT[..., None, None], sel_BTSk, -1)
    scale = numerics.softmax_scale(scale, q_BTHK.shape[-1])
    return _attend_selected(*operands, sel_BTSk, segments, attention, chunk_size, scale)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, call: Call) -> Array:
    """Return o_BTHV of a call with fixed kernels.

    This is `top1_chunk_attention` after the backends are picked; any pair of selection and attention kernels works.
    """
    return _forward(q_BTHK, k_BTGK, v_BTGV, call)[0]


def _forward(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, call: Call) -> tuple[Array, tuple]:
    sel_BTH = _select(q_BTHK, k_BTGK, call)
    return _forward_selected(q_BTHK, k_BTGK, v_BTGV, sel_BTH, None, call.attention, call.chunk_size, call.scale)


def _select(q_BTHK: Array, k_BTGK: Array, call: Call, segments_BT: Array | None = None) -> Array:
    options: dict[str, Any] = {"chunk_size": call.chunk_size, "scale": call.scale}
    options |= {"selection": call.selection, "top_k": call.top_k}
    if call.shortlist is not None:
        options["shortlist"] = call.shortlist
    if segments_BT is not None:
        options["segments_BT"] = segments_BT
    return call.selector.select(q_BTHK, k_BTGK, **options)


def _backward(call: Call, saved: tuple, do_BTHV: Array) -> tuple[Array, Array, Array]:
    return _backward_selected(call.attention, call.chunk_size, call.scale, saved, do_BTHV)[:3]


attend.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend_selected(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    sel_BTH: Array,
    segments_BT: Array | None,
    attention: ChunkAttention,
    C: int,
    scale: float,
) -> Array:
    return _forward_selected(q_BTHK, k_BTGK, v_BTGV, sel_BTH, segments_BT, attention, C, scale)[0]


def _forward_selected(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    sel_BTH: Array,
    segments_BT: Array | None,
    attention: ChunkAttention,
    C: int,
    scale: float,
) -> tuple[Array, tuple]:
    # checkpoint_name precedes the use: a policy that saves only the selection then skips it when the rest is recomputed
    sel_BTH = checkpoint_name(sel_BTH, "top1_selection")
    packed = {} if segments_BT is None else {"segments_BT": segments_BT}
    o_BTHV, lse_BTH = attention.forward(q_BTHK, k_BTGK, v_BTGV, sel_BTH, chunk_size=C, scale=scale, **packed)
    o_BTHV = checkpoint_name(o_BTHV, "attention_out")
    lse_BTH = checkpoint_name(lse_BTH, "attention_lse")
    return o_BTHV, (q_BTHK, k_BTGK, v_BTGV, o_BTHV, lse_BTH, sel_BTH, segments_BT)


def _backward_selected(
    attention: ChunkAttention, C: int, scale: float, saved: tuple, do_BTHV: Array
) -> tuple[Array, Array, Array, None, None]:
    q_BTHK, k_BTGK, v_BTGV, o_BTHV, lse_BTH, sel_BTH, segments_BT = saved
    operands = (q_BTHK, k_BTGK, v_BTGV, o_BTHV, lse_BTH, sel_BTH, do_BTHV)
    packed = {} if segments_BT is None else {"segments_BT": segments_BT}
    return *attention.backward(*operands, chunk_size=C, scale=scale, **packed), None, None


_attend_selected.defvjp(_forward_selected, _backward_selected)
