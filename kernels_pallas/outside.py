"""Backends from outside this package, which an op tries before its own."""

from kernels_pallas import backend
from kernels_pallas.validation import check_choice

# The names under which ops pick their backends (`backend.pick`).
OPS = (
    "causal_attention",
    "cross_entropy",
    "delta_rule",
    "head_norm",
    "linear_attention",
    "path_walk",
    "select_chunk",
    "selective_scan",
    "short_conv",
    "ssd",
    "state_scan",
    "token_shift",
    "top1_chunk_attention",
    "top1_chunk_decode",
    "top1_element_attention",
    "top1_element_decode",
    "wkv7_operands",
)


# Names of this package's backends.
TAKEN = (*backend.IMPLEMENTATIONS, "cudnn", "splash", "chunked")


def register_backend(op: str, new: backend.Backend) -> None:
    """Let `op` run on a backend of another package, which is tried before the op's own.

    Args:
      op: one of OPS; its kernels have the methods of the op's Protocol, `kernels_pallas/<op>/interface.py`.
      new: the backend. Its `refusal` says which problems it leaves to the others, and `implementation=new.name` selects
        it by name. A backend registered under the same name is replaced.

    The choice is made when a function is traced, so register before the first call; compiled functions do not change.

    Raises:
      ValueError: an op that does not exist, or the name of a backend of this package.
    """
    check_choice("op", op, OPS)
    if new.name in TAKEN:
        raise ValueError(f"{new.name!r} is a backend of kernels_pallas; give yours another name")
    backend.add_outside(op, new)
