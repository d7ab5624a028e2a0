"""Attention to selected chunks in plain XLA, with two schedules for the same result.

    masked   masked attention over the causal half (masked.py): T^2 K work, no sort; short sequences
    sorted   queries sorted by selected chunk, multiplied with that chunk (sorted.py): k T C K work

The sequence length picks one (`is_short`, docs/kernels.md). Tests and benchmarks also run each separately.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels_pallas import xla_tiles
from kernels_pallas.select_chunk import documents
from kernels_pallas.top1_chunk.xla import masked
from kernels_pallas.top1_chunk.xla import sorted as sorted_rows

# Up to this length the masked schedule is equally fast; measured on CPU and on a GPU.
MASKED_UP_TO = 512
SCHEDULES = {"masked": masked, "sorted": sorted_rows}


class Attention(NamedTuple):
    """Attention to a selection, and its gradient.

    `schedule` None means that the length chooses. Hashable, hence static.
    """

    schedule: str | None

    def forward(
        self,
        q_BTHK: Array,
        k_BTGK: Array,
        v_BTGV: Array,
        sel_BTH: Array,
        *,
        chunk_size: int,
        scale: float,
        segments_BT: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return (o_BTHV in v's dtype, lse_BTH in the accumulation dtype)."""
        H, G = q_BTHK.shape[2], k_BTGK.shape[2]
        o_BGMV, lse_BGM = self._pick(sel_BTH, chunk_size).forward(
            xla_tiles.to_rows(q_BTHK, G),
            k_BTGK.transpose(0, 2, 1, 3),
            v_BTGV.transpose(0, 2, 1, 3),
            _selection_to_rows(sel_BTH, H, G),
            chunk_size=chunk_size,
            heads_per_group=H // G,
            scale=scale,
            **_packed(segments_BT, H // G),
        )
        return xla_tiles.from_rows(o_BGMV, H).astype(v_BTGV.dtype), xla_tiles.scalar_from_rows(lse_BGM, H)

    def backward(
        self,
        q_BTHK: Array,
        k_BTGK: Array,
        v_BTGV: Array,
        o_BTHV: Array,
        lse_BTH: Array,
        sel_BTH: Array,
        do_BTHV: Array,
        *,
        chunk_size: int,
        scale: float,
        segments_BT: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Return (dq, dk, dv), each in the layout and dtype of its primal."""
        H, G = q_BTHK.shape[2], k_BTGK.shape[2]
        D_BTH = jnp.sum(do_BTHV.astype(lse_BTH.dtype) * o_BTHV.astype(lse_BTH.dtype), axis=-1)
        dq_BGMK, dk_BGSK, dv_BGSV = self._pick(sel_BTH, chunk_size).backward(
            xla_tiles.to_rows(q_BTHK, G),
            k_BTGK.transpose(0, 2, 1, 3),
            v_BTGV.transpose(0, 2, 1, 3),
            _selection_to_rows(sel_BTH, H, G),
            xla_tiles.scalar_to_rows(lse_BTH, G),
            xla_tiles.scalar_to_rows(D_BTH, G),
            xla_tiles.to_rows(do_BTHV, G),
            chunk_size=chunk_size,
            heads_per_group=H // G,
            scale=scale,
            **_packed(segments_BT, H // G),
        )
        dq_BTHK = xla_tiles.from_rows(dq_BGMK, H).astype(q_BTHK.dtype)
        dk_BTGK = dk_BGSK.transpose(0, 2, 1, 3).astype(k_BTGK.dtype)
        return dq_BTHK, dk_BTGK, dv_BGSV.transpose(0, 2, 1, 3).astype(v_BTGV.dtype)

    def _pick(self, sel_BTH: Array, chunk_size: int):
        top_k = sel_BTH.shape[3] if sel_BTH.ndim == 4 else 1
        return SCHEDULES[self.schedule or ("masked" if is_short(sel_BTH.shape[1], chunk_size, top_k) else "sorted")]


def is_short(length: int, chunk_size: int, top_k: int) -> bool:
    """Return whether the masked schedule runs.

    With one selected chunk, the limit was measured. With several, it also runs where a query's k + 1 chunks hold no
    fewer keys than the causal half that it processes.
    """
    return length <= (MASKED_UP_TO if top_k == 1 else max(MASKED_UP_TO, 2 * (top_k + 1) * chunk_size))


def _packed(segments_BT: Array | None, R: int) -> dict[str, Any]:
    """Return the schedules' argument `start_B1M`: the first token of each row's document."""
    return {} if segments_BT is None else {"start_B1M": jnp.repeat(documents.starts(segments_BT), R, axis=1)[:, None]}


def _selection_to_rows(sel_BTS: Array, heads: int, groups: int) -> Array:
    """Rearrange [B, T, S], or [B, T, S, k], to [B, G, T * R, k].

    One chunk is k = 1. If the heads of a group share a selection, it is repeated.
    """
    sel_BTSk = sel_BTS if sel_BTS.ndim == 4 else sel_BTS[..., None]
    each = heads // sel_BTS.shape[2]
    return xla_tiles.to_rows(sel_BTSk if each == 1 else jnp.repeat(sel_BTSk, each, axis=2), groups)


BY_LENGTH, MASKED, SORTED = Attention(None), Attention("masked"), Attention("sorted")
