"""Packed documents: the number of each token's document, and its position in the document."""

import jax.numpy as jnp
from jaxtyping import Int

import kernels_pallas
from seqjax.types import Array


def document_numbers(tokens_BT: Int[Array, "B T"], bos: int, eos: int) -> Int[Array, "B T"]:
    """Return the number of each token's document, int32 [B, T], the `segments` of ops and mixers.

    A document begins at each BOS after an EOS. If the ids are equal, an EOS that begins a document does not end it.
    """
    begins_BT = (tokens_BT[:, :-1] == eos) & (tokens_BT[:, 1:] == bos)
    return jnp.pad(jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def document_positions(segments_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return each token's position in its document, int32 [B, T]."""
    return kernels_pallas.segment_positions(segments_BT)
