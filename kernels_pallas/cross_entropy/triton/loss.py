"""Launch the Triton cross-entropy kernel (kernels.py)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.cross_entropy.triton import kernels
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded


class Tile(NamedTuple):
    """Maximal logits per step (a step covers one token), and warps."""

    block: int
    warps: int


# Chosen from the compiler's reports for sm80 and sm90: at most 57 registers per thread at every tested vocabulary, and
# two or three programs then share a multiprocessor. A step of 8,192 logits takes up to 104 registers if the vocabulary
# is not a multiple of 4, because rows are then read one number at a time.
TILES = {"loss": Tile(4096, 16)}


def tile(n_vocab: int) -> Tile:
    """Return the table entry, or a smaller tile for a small vocabulary.

    In the interpreter the tile is small: tests then cover several blocks.
    """
    entry = Tile(16, 4) if interpreter.is_chosen() else TILES["loss"]
    block = min(entry.block, padded(n_vocab))
    return Tile(block, max(1, min(entry.warps, block // 128)))


def run(logits_BCO: Array, targets_BC: Array, weights_BC: Array, *, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Return (losses_BC, g_BCO)."""
    losses = fold_vmap(partial(_run, dtype=dtype), "b c o, b c, b c -> b c, b c o", split=("b", "c"))
    return losses(logits_BCO, targets_BC, weights_BC)


def _run(logits_BCO: Array, targets_BC: Array, weights_BC: Array, *, dtype: jnp.dtype) -> tuple[Array, Array]:
    B, C, O = logits_BCO.shape
    entry = tile(O)
    losses_BC, g_BCO = runtime.launch(
        kernels.loss_kernel,
        logits_BCO,
        targets_BC,
        weights_BC,
        out_shape=[jax.ShapeDtypeStruct((B, C), weights_BC.dtype), jax.ShapeDtypeStruct((B, C, O), dtype)],
        grid=(B * C,),
        num_warps=entry.warps,
        name="cross_entropy",
        O=O,
        BLOCK=entry.block,
    )
    return losses_BC, g_BCO
