"""The `xla` backend of Top-1 Chunk: any device, any T, O(T) memory."""

from kernels_pallas.backend import Backend
from kernels_pallas.top1_chunk.interface import ChunkAttention, ChunkDecoding


def load() -> ChunkAttention:
    """Import the attention; the sequence length chooses its schedule."""
    from kernels_pallas.top1_chunk.xla import attention

    return attention.BY_LENGTH


def load_decoding() -> ChunkDecoding:
    """Import the decoding step."""
    from kernels_pallas.top1_chunk.xla import decode

    return decode


BACKEND = Backend("xla", load)
DECODE_BACKEND = Backend("xla", load_decoding)
