"""The `cudnn` backend of causal attention.

It calls cuDNN's flash attention through `jax.nn.dot_product_attention`.
"""

import jax
from jax import Array
from jax.sharding import PartitionSpec

from kernels_pallas import device
from kernels_pallas.attention.interface import CausalAttention, is_automatic
from kernels_pallas.backend import Backend, Problem

B300, B300_CUDNN = 103, 91_100  # compute capability, and the first cuDNN version with kernels for it


def refusal(problem: Problem) -> str | None:
    """Return why cuDNN refuses a problem, or None.

    Reasons: the machine, dtypes, head dim, odd length, ALiBi, gates, or segments. JAX checks most of these in
    `jax._src.cudnn.fused_attention_stablehlo` when the forward or backward pass is traced, but it does not check the
    GPU generation. A problem does not state whether it will be differentiated, so this refuses everything that training
    refuses.
    """
    capability = device.compute_capability() if problem.platform == "gpu" else None
    if capability is None:
        return f"cuDNN needs an NVIDIA GPU, this is a {problem.platform}"
    if capability < device.AMPERE:
        return f"cuDNN's flash attention needs compute capability 8.0 (A100) or later, this is {capability / 10}"
    if capability == B300 and (device.cudnn_version() or B300_CUDNN) < B300_CUDNN:
        return "compute capability 10.3 needs cuDNN 9.11 or later"
    dtypes = sorted({x.dtype.name for x in problem.operands})
    if len(dtypes) > 1 or dtypes[0] not in ("bfloat16", "float16"):
        return f"operands are {' and '.join(dtypes)}; cuDNN takes bfloat16 or float16 for all"
    head_dim, most = problem.operands[0].shape[-1], 256 if capability >= device.HOPPER else 128
    if head_dim % 8 or head_dim > most:
        return f"cuDNN takes head dims that are multiples of 8, up to {most}, not {head_dim}"
    if (n_tokens := problem.operands[0].shape[1]) % 2:
        return f"cuDNN trains on even lengths only, not on {n_tokens} tokens"
    if problem.options["slopes"]:
        return "cuDNN takes no float32 bias (ALiBi) with 16-bit inputs"
    if problem.options["has_gates"]:
        return "cuDNN takes no float32 bias (forget gates) with 16-bit inputs"
    if problem.options.get("has_segments"):
        return "JAX's public interface to cuDNN has no segments"
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
    segments_BT: Array | None = None,
) -> Array:
    """Return o_BTHK; `refusal` excludes slopes, gates and segments.

    JAX's sharding rule requires equal shardings of queries, keys, values and gradients. With fewer key-value heads, or
    with heads that the devices do not divide, XLA would choose different shardings.
    """
    del log_f_BTH, slopes, segments_BT

    def alike(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, split) if is_automatic(split) else x

    o_BTHK: Array = jax.nn.dot_product_attention(
        alike(q_BTHK),
        alike(k_BTGK),
        alike(v_BTGK),
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )
    return alike(o_BTHK)
