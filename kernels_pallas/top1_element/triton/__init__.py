"""The `triton` backend of Top-1 Element attention and decoding: sm80 to sm90."""

from kernels_pallas.backend import Backend
from kernels_pallas.top1_element.interface import ElementAttention, ElementDecoding
from kernels_pallas.triton import limits


def load() -> ElementAttention:
    """Import the attention kernels."""
    from kernels_pallas.top1_element.triton import attention

    return attention


def load_decoding() -> ElementDecoding:
    """Import the decoding kernels."""
    from kernels_pallas.top1_element.triton import decode

    return decode


BACKEND = Backend("triton", load, limits.attention)
DECODE_BACKEND = Backend("triton", load_decoding, limits.attention)
