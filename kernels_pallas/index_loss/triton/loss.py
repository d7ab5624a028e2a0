"""Launch the Triton kernels of the index loss.

A query reads its local block and its chosen blocks. These rows (query and block) are sorted by block (sort_plan.py),
for each key head: the products are those of the keys that are read, T (n + 1) C K per head, not T^2 K / 2. Two passes
compute the scores; the first gives the log-sum-exps that the second needs for p and softmax I.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap, heads
from kernels_pallas.index_loss.triton import kernels
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.triton import interpreter, runtime, sort_plan
from kernels_pallas.triton.blocks import padded, precision

AT_ONCE = 4  # heads whose queries are loaded together


class Tile(NamedTuple):
    """Rows `m` and keys `n` of a step, steps of a segment, warps, and stages."""

    m: int
    n: int
    steps: int
    warps: int
    stages: int


def tile_of(dim: int, block_size: int, dtype: Any) -> Tile:
    """Return the tile of both passes for the wider of the head dims."""
    block = padded(block_size)
    if interpreter.is_chosen():  # small: tests then cover several tiles
        return Tile(16, 16, 2, 4, 1)
    is_half = jnp.dtype(dtype).itemsize == 2
    if not is_half:
        return Tile(32, min(block, 32), 16, 4, 1)
    # Small tiles: the next tile's queries are loaded ahead, and several programs share a multiprocessor.
    keys = min(block, 32 if padded(dim) > 64 else 64)
    return Tile(32, keys, 16, 8 if keys > 32 else 4, 2)


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
    B, T, G, _ = index_q_BTGN.shape
    f = partial(_run, C=block_size, n_terms=B * T * G, with_gradients=with_gradients)
    names = "b" + ", b t g n, b t n" * with_gradients
    rule = f"b t g n, b t n, b t (g r) k, b t g k, b t g m -> {names}"
    loss_B, *gradients = fold_vmap(f, rule, **heads(q_BTHK, k_BTGK))(
        index_q_BTGN, index_k_BTN, q_BTHK, k_BTGK, sel_BTGn
    )
    if with_gradients:
        gradients[1] = gradients[1].astype(index_k_BTN.dtype)
    return (loss_B.sum(), *gradients)


def _run(
    index_q_BTGN: Array,
    index_k_BTN: Array,
    q_BTHK: Array,
    k_BTGK: Array,
    sel_BTGn: Array,
    *,
    C: int,
    n_terms: int,
    with_gradients: bool,
) -> tuple[Array, ...]:
    (B, T, H, K), (G, N) = q_BTHK.shape, index_q_BTGN.shape[2:]
    NC, R, read = -(-T // C), H // G, sel_BTGn.shape[3] + 1
    tile = tile_of(max(K, N), C, q_BTHK.dtype)
    segment, pieces = tile.m * tile.steps, -(-C // tile.n)
    own_BTG1 = jnp.broadcast_to((jnp.arange(T, dtype=jnp.int32) // C)[:, None, None], (B, T, G, 1))
    read_BTGr = jnp.concatenate([own_BTG1, sel_BTGn], axis=3)
    plan = sort_plan.make(read_BTGr.swapaxes(2, 3).reshape(B, T * read, G), NC)
    ends_BGc = sort_plan.item_ends(plan, segment)
    segments = sort_plan.most_items(T + sort_plan.most_rows(T, C, read - 1), NC, segment)
    sizes = {"T": T, "G": G, "N": N, "NP": padded(N), "C": C, "NC": NC}
    sizes |= {"SEGMENTS": segments, "PIECES": pieces, "BLOCK_N": tile.n}
    passes: Any = {"grid": (segments * pieces * B * G,), "num_warps": tile.warps, "num_stages": tile.stages}
    passes |= sizes | {"H": H, "K": K, "KP": padded(K), "READ": read, "NCP": padded(NC), "SEGMENT": segment}
    passes |= {
        "BLOCK_M": tile.m,
        "AT_ONCE": min(R, AT_ONCE),
        "LOG2_SCALE": LOG2_E * K**-0.5,
        "INDEX_LOG2_SCALE": LOG2_E * N**-0.5,
    }
    passes |= {"PRECISION": precision(q_BTHK.dtype)}
    fp32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    operands = (index_q_BTGN, index_k_BTN, q_BTHK, k_BTGK, *plan, ends_BGc)
    (part_BTGrpX,) = runtime.launch(
        kernels.lse_kernel,
        *operands,
        out_shape=[fp32((B, T, G, read, pieces, R + 1))],
        name="index_loss_lse",
        **passes,
    )
    is_read_BTGr11 = (read_BTGr >= 0)[..., None, None]
    part_BTGrpX = jnp.where(is_read_BTGr11, part_BTGrpX, -jnp.inf)
    most_BTGX = part_BTGrpX.max((3, 4))
    lse_BTGX = most_BTGX + jnp.log2(jnp.exp2(part_BTGrpX - most_BTGX[:, :, :, None, None]).sum((3, 4)))
    nothing = jax.ShapeDtypeStruct((1,), index_q_BTGN.dtype)  # one entry: not written
    loss_BGsp, dq_BTGrpN, dk_BGsCN = runtime.launch(
        kernels.loss_kernel,
        *operands,
        lse_BTGX,
        out_shape=[
            fp32((B, G, segments, pieces)),
            jax.ShapeDtypeStruct((B, T, G, read, pieces, N), index_q_BTGN.dtype) if with_gradients else nothing,
            fp32((B, G, segments, C, N)) if with_gradients else nothing,
        ],
        name="index_loss",
        GRADIENTS=with_gradients,
        **passes,
    )
    loss_B = loss_BGsp.sum((1, 2, 3)) / n_terms
    if not with_gradients:
        return (loss_B,)
    scale = N**-0.5 / n_terms
    (dk_BTN,) = runtime.launch(
        kernels.keys_kernel,
        dk_BGsCN,
        ends_BGc,
        out_shape=[fp32(index_k_BTN.shape)],  # fp32, because devices add their shares of the heads
        grid=(NC * pieces * B,),
        name="index_loss_keys",
        SCALE=scale,
        **sizes,
    )
    dq_BTGN = jnp.where(is_read_BTGr11, dq_BTGrpN, 0).sum((3, 4), dtype=jnp.float32) * scale
    return loss_B, dq_BTGN.astype(index_q_BTGN.dtype), dk_BTN
