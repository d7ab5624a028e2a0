"""Register backends from other packages.

An op tries them before its built-in backends.
"""

from kernels_pallas import backend
from kernels_pallas.validation import check_choice

# Op names as passed to `backend.pick`.
OPS = (
    "causal_attention",
    "compressed_attention",
    "cross_entropy",
    "delta_rule",
    "head_norm",
    "index_loss",
    "kda",
    "linear_attention",
    "log_linear",
    "mamba3_operands",
    "path_attention",
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


# Names of the built-in backends.
TAKEN = (*backend.IMPLEMENTATIONS, "cudnn", "splash", "chunked")


def register_backend(op: str, new: backend.Backend) -> None:
    """Register a backend from another package for `op`.

    It is tried before the built-in backends.

    Args:
      op: one of OPS. The kernels implement the op's Protocol, `kernels_pallas/<op>/interface.py`.
      new: the backend. Where its `refusal` returns a reason, the other backends run. `implementation=new.name` selects
        it. A registered backend with the same name is replaced.

    The choice is made when a function is traced: register before the first call. Compiled functions do not change.

    Raises:
      ValueError: an unknown op, or the name of a built-in backend.
    """
    check_choice("op", op, OPS)
    if new.name in TAKEN:
        raise ValueError(f"{new.name!r} is a backend of kernels_pallas; give yours another name")
    backend.add_outside(op, new)
