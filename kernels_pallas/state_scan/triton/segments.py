"""Passes over time in segments, for too few sequences to fill the GPU.

Each program of a pass takes some state columns sequentially through all chunks. Segments take two launches of the
kernel, with a small scan between them:

    ends      all segments in parallel: N, the end state from zero, and M, the map from start to end state
    starts    S <- M S + N over the segments
    pass      the usual pass over all segments in parallel, from these starts

M is the product of the decays. If a chunk multiplies the state with a matrix, the first launch computes M from K
additional columns that start from the identity. For one sequence of 102,400 tokens this raised Gated DeltaNet's
training from 274k to 360k tokens/s on a shared H200 (lab/log/kernels.md).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.chunks import split_chunks
from kernels_pallas.state_scan.triton.scan import elementwise_share, products_share

# Segments raise the number of programs to at most PROGRAMS, three for each multiprocessor of an H100, and have at least
# SHORTEST chunks.
PROGRAMS, SHORTEST = 396, 8


def pass_states(
    launch: Callable[..., tuple[Array, ...]],
    start_BHKV: Array,
    like: Sequence[Any],
    *,
    block: int,
    reverse: bool,
    log2_decays_BcHK: Array | None = None,
) -> tuple[Array, ...]:
    """Return the outputs of a pass over the chunks, and the last state [B, H, K, V].

    Args:
      launch: `launch(starts, out=[*like, lasts], segment=, ends=)` runs the kernel on segments of `segment` chunks.
        starts and lasts are float32 states [B, s, H, K, V]. With `ends` it starts from zero and writes only lasts,
        which without `log2_decays_BcHK` are [B, s, H, K, V + K], with the columns from the identity last.
      start_BHKV: state before the first chunk, or in reverse after the last chunk.
      like: output shapes; the chunk states [B, c, H, K, V] come first.
      block: state columns per program.
      reverse: whether the pass goes back in time.
      log2_decays_BcHK: log2 of each chunk's total decay; None if a chunk multiplies the state with a matrix.
    """
    (B, n_chunks, H, K, V) = like[0].shape
    more = K if log2_decays_BcHK is None else 0
    segment = length(B * H * -(-V // block), n_chunks, work=2 + more / V)
    n_segments, starts = -(-n_chunks // segment), start_BHKV[:, None]
    lasts = partial(jax.ShapeDtypeStruct, dtype=starts.dtype)
    if n_segments > 1:
        out = [jax.ShapeDtypeStruct((1,), x.dtype) for x in like]  # placeholders: not written
        *_, ends = launch(starts, out=[*out, lasts((B, n_segments, H, K, V + more))], segment=segment, ends=True)
        if log2_decays_BcHK is None:
            starts = _products(ends, start_BHKV, reverse=reverse)
        else:
            decays = jnp.exp2(jnp.sum(split_chunks(log2_decays_BcHK, segment), axis=2))
            starts, _ = elementwise_share(decays[..., None], ends, start_BHKV, reverse=reverse)
    *written, last = launch(starts, out=[*like, lasts((B, n_segments, H, K, V))], segment=segment, ends=False)
    return *written, last[:, 0 if reverse else -1]


def length(n_programs: int, n_chunks: int, *, work: float) -> int:
    """Return the chunks per segment; all chunks if segments gain little.

    `work` is the work of both launches relative to a single pass. At least 2 * work segments are required, because
    programs that share a multiprocessor are slower.
    """
    most = min(PROGRAMS // n_programs, n_chunks // SHORTEST)
    return n_chunks if most < 2 * work else -(-n_chunks // most)


def _products(ends_BsHKN: Array, start_BHKV: Array, *, reverse: bool) -> Array:
    """Return the segment starts [B, s, H, K, V] from `ends`: N, followed by M.

    float32, with three TF32 products each.
    """
    ends_sBHKN, V = jnp.moveaxis(ends_BsHKN, 1, 0), start_BHKV.shape[-1]
    n, m = ends_sBHKN[..., :V], ends_sBHKN[..., V:]
    m = jnp.swapaxes(m, -1, -2) if reverse else m  # in reverse, the kernel multiplies by the transpose
    no_decay = jnp.zeros((*m.shape[:3], 1), m.dtype)
    starts_sBHKV, _ = products_share(no_decay, m, n, start_BHKV, is_single=False, reverse=reverse)
    return jnp.moveaxis(starts_sBHKV, 0, 1)
