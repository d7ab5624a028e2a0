"""The `triton` cross-entropy backend: sm80 to sm90."""

from kernels_pallas.backend import Backend, Problem
from kernels_pallas.cross_entropy.interface import CrossEntropy
from kernels_pallas.triton import limits


def refusal(problem: Problem) -> str | None:
    """Return why Triton refuses: the machine, the dtypes, or a sharded vocabulary."""
    logits, targets, weights = problem.operands
    reason = limits.machine(problem, entry=logits.shape[-1])  # offsets within one token's logits are 32-bit
    if reason is not None:
        return reason
    if limits.dtype_names(logits, weights) != ["float32"] or limits.dtype_names(targets) != ["int32"]:
        names = " and ".join(limits.dtype_names(logits, weights, targets))
        return f"operands are {names}; logits and weights must be float32, targets int32"
    if problem.options["dtype"].name not in limits.DTYPES:
        return f"the gradient's dtype is {problem.options['dtype'].name}; it may be {', '.join(limits.DTYPES)}"
    if problem.options["is_vocabulary_split"]:
        return "devices share the vocabulary (a mesh with tensor above 1), but the kernel reads whole rows"
    return None


def load() -> CrossEntropy:
    """Import the kernel."""
    from kernels_pallas.cross_entropy.triton import loss

    return loss


BACKEND = Backend("triton", load, refusal)
