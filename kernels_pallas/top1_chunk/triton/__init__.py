"""The `triton` backend of Top-1 Chunk attention and decoding: sm80 to sm90."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.select_chunk.triton import long_list
from kernels_pallas.top1_chunk.interface import ChunkAttention, ChunkDecoding
from kernels_pallas.triton import limits

MAX_CHUNK = 256  # a decoding step holds one chunk of keys in shared memory


def load() -> ChunkAttention:
    """Import the attention kernels."""
    from kernels_pallas.top1_chunk.triton import attention

    return attention


def decode_refusal(problem: Problem) -> str | None:
    """Return why decoding refuses a problem, or None.

    Reasons: as for attention and selection, or a chunk that exceeds the tile of one step.
    """
    if problem.options["chunk_size"] > MAX_CHUNK:
        return f"chunk_size {problem.options['chunk_size']} is larger than {MAX_CHUNK}"
    return (
        limits.without(problem, "best_key_int8", "random")
        or long_list(problem, problem.operands[1].shape[1])
        or limits.attention(problem)
    )


def load_decoding() -> ChunkDecoding:
    """Import the decoding kernels."""
    from kernels_pallas.top1_chunk.triton import decode

    return decode


BACKEND = Backend("triton", load, limits.attention)
DECODE_BACKEND = Backend("triton", load_decoding, decode_refusal)
