"""A pass over time in segments, where there are too few sequences to fill the device.

A program of such a pass takes some columns of a state through all chunks, one after the other. In segments of time a
first launch makes side by side what each makes of zero, N, and what it multiplies a state with, M: its decays, or if
these are not all what it makes of the identity, K more columns. Then S <- M S + N over the segments, and a second
launch does from their starts what the pass alone would have done.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.chunks import split_chunks
from kernels_pallas.state_scan.triton.scan import elementwise_share, products_share

# Programs of a pass are brought to at most so many, three for each multiprocessor of an H100, by segments of at least
# so many chunks.
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
    """Return what a pass over the chunks writes, and the last state [B, H, K, V].

    Args:
      launch: `launch(starts, out=[*like, lasts], segment=, ends=)` of a kernel for float32 starts and last states
        [B, s, H, K, V] of segments of so many chunks. If `ends` it writes the lasts alone, from zero, without
        `log2_decays` [B, s, H, K, V + K] with the columns of the identity behind the others.
      start_BHKV: the state before the first chunk, or in reverse behind the last.
      like: shapes of what it writes, the states of the chunks [B, c, H, K, V] first.
      block: columns of the state per program.
      reverse: whether the pass goes back.
      log2_decays_BcHK: logarithms to base 2 of all that a chunk multiplies the state with; None is a matrix.
    """
    (B, n_chunks, H, K, V) = like[0].shape
    more = K if log2_decays_BcHK is None else 0
    segment = length(B * H * -(-V // block), n_chunks, work=2 + more / V)
    n_segments, starts = -(-n_chunks // segment), start_BHKV[:, None]
    lasts = partial(jax.ShapeDtypeStruct, dtype=starts.dtype)
    if n_segments > 1:
        out = [jax.ShapeDtypeStruct((1,), x.dtype) for x in like]  # not written
        *_, ends = launch(starts, out=[*out, lasts((B, n_segments, H, K, V + more))], segment=segment, ends=True)
        if log2_decays_BcHK is None:
            starts = _products(ends, start_BHKV, reverse=reverse)
        else:
            decays = jnp.exp2(jnp.sum(split_chunks(log2_decays_BcHK, segment), axis=2))
            starts, _ = elementwise_share(decays[..., None], ends, start_BHKV, reverse=reverse)
    *written, last = launch(starts, out=[*like, lasts((B, n_segments, H, K, V))], segment=segment, ends=False)
    return *written, last[:, 0 if reverse else -1]


def length(n_programs: int, n_chunks: int, *, work: float) -> int:
    """Return the chunks per segment for so many programs of a pass over so many chunks; all, if segments gain little.

    `work` is what both launches have to do, 1 the pass alone. There have to be twice as many segments, because programs
    that share a multiprocessor are slower.
    """
    most = min(PROGRAMS // n_programs, n_chunks // SHORTEST)
    return n_chunks if most < 2 * work else -(-n_chunks // most)


def _products(ends_BsHKN: Array, start_BHKV: Array, *, reverse: bool) -> Array:
    """Return the starts of the segments [B, s, H, K, V] from N and, behind it, M: float32, products of three TF32."""
    ends_sBHKN, V = jnp.moveaxis(ends_BsHKN, 1, 0), start_BHKV.shape[-1]
    n, m = ends_sBHKN[..., :V], ends_sBHKN[..., V:]
    m = jnp.swapaxes(m, -1, -2) if reverse else m  # the kernel multiplies with its transpose then
    no_decay = jnp.zeros((*m.shape[:3], 1), m.dtype)
    starts_sBHKV, _ = products_share(no_decay, m, n, start_BHKV, is_single=False, reverse=reverse)
    return jnp.moveaxis(starts_sBHKV, 0, 1)
