"""The `cudnn` backend of causal attention: cuDNN's flash attention through `jax.nn.dot_product_attention`."""

import jax
from jax import Array
from jax.sharding import PartitionSpec

from kernels_pallas import device
from kernels_pallas.attention.interface import CausalAttention
from kernels_pallas.backend import Backend, Problem


def refusal(problem: Problem) -> str | None:
    """Say why cuDNN refuses: the machine (JAX does not check its generation), dtypes, the head dim, ALiBi, or gates."""
    capability = device.compute_capability() if problem.platform == "gpu" else None
    if capability is None:
        return f"cuDNN needs an NVIDIA GPU, this is a {problem.platform}"
    if capability < device.AMPERE:
        return f"cuDNN's flash attention begins with compute capability 8.0 (A100), this is {capability / 10}"
    dtypes = sorted({x.dtype.name for x in problem.operands})
    if len(dtypes) > 1 or dtypes[0] not in ("bfloat16", "float16"):
        return f"operands are {' and '.join(dtypes)}; cuDNN takes bfloat16 or float16 for all"
    head_dim, most = problem.operands[0].shape[-1], 256 if capability >= device.HOPPER else 128
    if head_dim % 8 or head_dim > most:
        return f"cuDNN takes head dims that 8 divides, up to {most}, not {head_dim}"
    if problem.options["slopes"]:
        return "cuDNN takes no float32 bias (ALiBi) beside 16-bit inputs"
    if problem.options["has_gates"]:
        return "cuDNN takes no float32 bias (forget gates) beside 16-bit inputs"
    return None


def load() -> CausalAttention:
    """Return this module."""
    from kernels_pallas.attention import cudnn

    return cudnn


BACKEND = Backend("cudnn", load, refusal)


def attend(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    log_f_BTH: Array | None = None,
    *,
    window: int,
    scale: float,
    slopes: tuple[float, ...],
    split: PartitionSpec | None = None,
) -> Array:
    """Return o_BTHK; JAX has a sharding rule for it, and `refusal` keeps slopes and gates away."""
    del log_f_BTH, slopes, split
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BTGK,
        v_BTGK,
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )
