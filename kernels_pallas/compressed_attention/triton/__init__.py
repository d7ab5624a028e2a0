"""The `triton` backend of the compressed attention, for sm80 to sm90."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.compressed_attention.interface import CompressedAttention
from kernels_pallas.triton import limits

LEAST_LENGTH = 16  # queries; shorter inputs are decoding steps


def refusal(problem: Problem) -> str | None:
    """Return why this backend cannot run, or None.

    Checks the machine, the dtypes, the head dims, the positions and the number of queries.
    """
    q, *means = problem.operands
    (_, T, H, K), (c, _, V) = q.shape, means[1].shape[1:]
    entry = T * H * max(K, V, min(c, problem.options["top_k"]))
    reason = limits.attention(problem._replace(operands=(q,)), entry=entry)
    if reason is not None:
        return reason
    if limits.dtype_names(*means) != ["float32"]:
        return f"means are {' and '.join(limits.dtype_names(*means))}; it takes float32"
    if V > limits.MAX_DIM:
        return f"head dim {V} is larger than {limits.MAX_DIM}"
    if problem.options["has_positions"]:
        return "its queries have the positions 0 to T - 1"
    if T < LEAST_LENGTH and not problem.is_named:
        return f"{T} queries are less than {LEAST_LENGTH}"
    return None


def load() -> CompressedAttention:
    """Import the kernels."""
    from kernels_pallas.compressed_attention.triton import attention

    return attention


BACKEND = Backend("triton", load, refusal)
