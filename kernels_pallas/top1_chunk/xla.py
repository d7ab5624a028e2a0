"""The `xla` backend of Top-1 Chunk: any device, any T, O(T) memory in both directions.

Attention given the selection has two schedules with the same result:

    masked   masked attention over the causal half (xla_masked.py): T^2 K work, no sort; short sequences
    sorted   queries sorted by selection, each chunk against the queries that chose it (xla_sorted.py): T C K
    work

The length picks (MASKED_UP_TO, docs/kernels.md); tests reach each by name.
"""

from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels_pallas import checks, tiles
from kernels_pallas.top1_chunk import xla_masked, xla_sorted
from kernels_pallas.top1_chunk.xla_select import select

__all__ = ["SCHEDULES", "Attend", "attend", "select"]

SCHEDULES = {"masked": xla_masked, "sorted": xla_sorted}

# Up to this length the masked schedule is as fast; measured on CPU and on a GPU.
MASKED_UP_TO = 512


class Attend(NamedTuple):
    """Attention given a selection, and its gradient; `schedule` None picks by length. Hashable, so static."""

    schedule: str | None

    def fused(self, *operands: Array, **options: Any) -> None:
        """None: there is no schedule here that selects and attends at once."""
        del operands, options

    def forward(
        self, q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, sel_BTH: Array, *, chunk_size: int, scale: float
    ) -> tuple[Array, Array]:
        """(o_BTHV in v's dtype, lse_BTH in the accumulation dtype)."""
        H, G = q_BTHK.shape[2], k_BTGK.shape[2]
        o_BGMV, lse_BGM = self._module(q_BTHK.shape[1]).forward(
            tiles.to_rows(q_BTHK, G),
            k_BTGK.transpose(0, 2, 1, 3),
            v_BTGV.transpose(0, 2, 1, 3),
            tiles.scalar_to_rows(sel_BTH, G),
            chunk_size=chunk_size,
            heads_per_group=H // G,
            scale=scale,
        )
        return tiles.from_rows(o_BGMV, H).astype(v_BTGV.dtype), tiles.scalar_from_rows(lse_BGM, H)

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
    ) -> tuple[Array, Array, Array]:
        """(dq, dk, dv), each in the layout and dtype of its primal."""
        H, G = q_BTHK.shape[2], k_BTGK.shape[2]
        D_BTH = jnp.sum(do_BTHV.astype(lse_BTH.dtype) * o_BTHV.astype(lse_BTH.dtype), axis=-1)
        dq_BGMK, dk_BGSK, dv_BGSV = self._module(q_BTHK.shape[1]).backward(
            tiles.to_rows(q_BTHK, G),
            k_BTGK.transpose(0, 2, 1, 3),
            v_BTGV.transpose(0, 2, 1, 3),
            tiles.scalar_to_rows(sel_BTH, G),
            tiles.scalar_to_rows(lse_BTH, G),
            tiles.scalar_to_rows(D_BTH, G),
            tiles.to_rows(do_BTHV, G),
            chunk_size=chunk_size,
            heads_per_group=H // G,
            scale=scale,
        )
        dq_BTHK = tiles.from_rows(dq_BGMK, H).astype(q_BTHK.dtype)
        dk_BTGK = dk_BGSK.transpose(0, 2, 1, 3).astype(k_BTGK.dtype)
        return dq_BTHK, dk_BTGK, dv_BGSV.transpose(0, 2, 1, 3).astype(v_BTGV.dtype)

    def _module(self, length: int):
        if self.schedule is not None:
            checks.check_choice("schedule", self.schedule, SCHEDULES)
            return SCHEDULES[self.schedule]
        return SCHEDULES["masked" if length <= MASKED_UP_TO else "sorted"]


@cache
def attend(schedule: str | None = None) -> Attend:
    """The attention of this backend with a schedule by name, or by length."""
    return Attend(schedule)
