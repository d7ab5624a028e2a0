"""The `triton` backend of the index loss, for sm80 to sm90."""

from kernels_pallas.backend import Backend
from kernels_pallas.index_loss.interface import IndexLoss
from kernels_pallas.triton import limits


def load() -> IndexLoss:
    """Import the kernels."""
    from kernels_pallas.index_loss.triton import loss

    return loss


BACKEND = Backend("triton", load, limits.attention)
