"""The `triton` backend of the head norm, for sm80 and later."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.head_norm.interface import HeadNorm
from kernels_pallas.triton import limits
from kernels_pallas.triton.blocks import padded

MAX_CHANNELS = 8192  # per norm, with dims padded to powers of two; a program keeps all of them in registers


def refusal(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run, or None.

    Checks the machine, the dtypes, the norm width, and whether devices share a norm's channels.
    """
    reason = limits.machine(problem)
    if reason is not None:
        return reason
    data, wide = problem.operands[: problem.options["n_data"]], problem.operands[problem.options["n_data"] :]
    if set(limits.dtype_names(*data)) - set(limits.DTYPES) or limits.dtype_names(*wide) != ["float32"]:
        names = " and ".join(limits.dtype_names(*data, *wide))
        return f"operands are {names}; data may be {', '.join(limits.DTYPES)}, gain, bias and factors float32"
    H, V = data[0].shape[-2:]
    channels = padded(V) << ((H - 1).bit_length() if problem.options["gate_first"] else 0)
    if channels > MAX_CHANNELS:
        return f"a norm over {channels} channels (dims padded to powers of two) is wider than {MAX_CHANNELS}"
    if problem.options["gate_first"] and problem.options["is_split"]:
        return "devices share the channels of a norm (a mesh with tensor above 1), but the kernel reads whole tokens"
    return None


def load() -> HeadNorm:
    """Import the kernels."""
    from kernels_pallas.head_norm.triton import norm

    return norm


BACKEND = Backend("triton", load, refusal)
