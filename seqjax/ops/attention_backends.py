"""What computes `ops.attention.causal_attention`, in the order in which it is asked.

    cudnn    cuDNN's flash attention: 16-bit inputs on NVIDIA GPUs since the A100
    splash   JAX's splash attention, a Pallas kernel for TPUs (`ops.splash_attention`)
    xla      dense: the scores of all pairs exist at once, in memory quadratic in T. Unless it is named it takes
             sequences of up to DENSE_LENGTH tokens only
    chunked  memory linear in T, on any device (`ops.chunked_attention`)

Each is a function of q [B, T, H, K], k and v [B, T, G, K] and the keywords `window`, `scale` and `slopes`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas import Backend, Problem, device
from seqjax.ops.chunked_attention import chunked_attention
from seqjax.types import Array

Attend = Callable[..., Array]
ORDER = ("cudnn", "splash", "xla", "chunked")
# Chunked attention is the faster one at every length that was measured on a CPU (docs/kernels.md). Up to here the
# scores are small, and whole sequences compile to fewer loops.
DENSE_LENGTH = 256


def dense_attention(
    q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, *, window: int, scale: float, slopes: tuple[float, ...]
) -> Array:
    """Return causal attention from all scores at once, as `jax.nn.dot_product_attention` computes it."""
    bias_HTS = None
    if slopes:
        position_T = jnp.arange(q_BTHK.shape[1], dtype=jnp.float32)
        bias_HTS = jnp.asarray(slopes, jnp.float32)[:, None, None] * (position_T - position_T[:, None])
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BSGK,
        v_BSGK,
        bias=None if bias_HTS is None else bias_HTS[None],
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="xla",
    )


def cudnn_attention(
    q_BTHK: Array, k_BSGK: Array, v_BSGK: Array, *, window: int, scale: float, slopes: tuple[float, ...]
) -> Array:
    """Return causal attention by cuDNN, which has no ALiBi."""
    assert not slopes
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BSGK,
        v_BSGK,
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )


def cudnn_refusal(problem: Problem) -> str | None:
    """Return why cuDNN cannot run this; JAX itself does not check the generation of the GPU."""
    capability = device.compute_capability() if problem.platform == "gpu" else None
    dtypes = {x.dtype.name for x in problem.operands}
    head_dim = problem.operands[0].shape[-1]
    if capability is None:
        return f"cuDNN needs an NVIDIA GPU, this is a {problem.platform}"
    if capability < device.AMPERE:
        return f"cuDNN's flash attention begins with compute capability 8.0 (A100), this is {capability / 10}"
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}:
        return f"cuDNN takes bfloat16 or float16, not {', '.join(sorted(dtypes))}"
    most = 256 if capability >= device.HOPPER else 128
    if head_dim % 8 or head_dim > most:
        return f"cuDNN takes head dims that 8 divides, up to {most}, not {head_dim}"
    if problem.options["slopes"]:
        return "cuDNN takes no float32 bias (ALiBi) beside 16-bit inputs"
    return None


def splash_refusal(problem: Problem) -> str | None:
    """Return why splash attention cannot run this."""
    dtypes = {x.dtype.name for x in problem.operands}
    if problem.platform != "tpu":
        return f"splash attention needs a TPU, this is a {problem.platform}"
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        return f"splash attention takes bfloat16 or float32, not {', '.join(sorted(dtypes))}"
    if problem.options["slopes"]:
        return "splash attention has no ALiBi"
    return None


def load_splash() -> Attend:
    """Import the kernel, which takes time and is of use on a TPU alone."""
    from seqjax.ops.splash_attention import splash_attention

    return splash_attention


def dense_refusal(problem: Problem) -> str | None:
    """Leave long sequences to chunked attention, unless the dense one is named."""
    seq_len = problem.operands[0].shape[1]
    if problem.is_named or seq_len <= DENSE_LENGTH:
        return None
    return f"holds the scores of all pairs: only by name above {DENSE_LENGTH} tokens"


def _loads(attend: Attend) -> Callable[[], Attend]:
    return lambda: attend


BACKENDS: tuple[Backend[Attend], ...] = (
    Backend("cudnn", _loads(cudnn_attention), cudnn_refusal),
    Backend("splash", load_splash, splash_refusal),
    Backend("xla", _loads(dense_attention), dense_refusal),
    Backend("chunked", _loads(chunked_attention)),
)
