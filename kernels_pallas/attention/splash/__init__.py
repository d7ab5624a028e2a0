"""The `splash` backend of causal attention.

It runs JAX's splash attention, a Pallas kernel for TPUs.
"""

from kernels_pallas.attention.interface import CausalAttention
from kernels_pallas.backend import Backend, Problem


def refusal(problem: Problem) -> str | None:
    """Return why splash attention refuses: the machine, dtypes, ALiBi, or gates."""
    if problem.platform != "tpu":
        return f"splash attention needs a TPU, this is a {problem.platform}"
    dtypes = sorted({x.dtype.name for x in problem.operands})
    if len(dtypes) > 1 or dtypes[0] not in ("bfloat16", "float32"):
        return f"operands are {' and '.join(dtypes)}; splash attention takes bfloat16 or float32 for all"
    if problem.options["slopes"]:
        return "splash attention has no ALiBi"
    if problem.options["has_gates"]:
        return "splash attention has no forget gates"
    return None


def load() -> CausalAttention:
    """Import the kernel."""
    from kernels_pallas.attention.splash import kernel

    return kernel


BACKEND = Backend("splash", load, refusal)
