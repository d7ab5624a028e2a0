"""Causal softmax attention over interchangeable backends, in order of preference:

cudnn    cuDNN's flash attention: 16-bit inputs on NVIDIA GPUs since the A100
triton   forget gates: 16-bit or float32 inputs on NVIDIA GPUs since the A100
splash   JAX's splash attention, a Pallas kernel for TPUs
xla      dense: the scores of all pairs exist at once, in memory quadratic in T; long sequences by name only
chunked  memory linear in T, on any device
"""

from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from kernels_pallas import backend, numerics, validation
from kernels_pallas.attention import chunked, cudnn, splash, triton, xla

BACKENDS = (cudnn.BACKEND, triton.BACKEND, splash.BACKEND, xla.BACKEND, chunked.BACKEND)
ORDER = tuple(one.name for one in BACKENDS)


def causal_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G K"],
    log_f_BTH: Float[Array, "B T H"] | None = None,
    *,
    window: int = 0,
    scale: float | None = None,
    slopes: tuple[float, ...] = (),
    split: PartitionSpec | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Return causal attention, o_i = sum_j softmax_j(q_i . k_j * scale) v_j over 0 <= i - j < window.

    Args:
      q_BTHK: queries, fp32, bf16 or fp16; any T >= 1.
      k_BTGK: keys; G divides H, query head h reads key-value head h // (H // G).
      v_BTGK: values.
      log_f_BTH: logarithms of forget gates, one per position and query head, <= 0 and fp32: the sum of those of the
        positions j + 1 to i is added to the scaled scores, and differentiated. None is no gate. triton, xla and chunked
        alone.
      window: keys that a query sees, its own included; 0 for the whole past.
      scale: of the scores; 1 / sqrt(K) when None.
      slopes: ALiBi's, one per query head: -slope * (i - j) is added to the scaled scores, which are fp32.
      split: how [B, T, G, K] is split over the current mesh, for kernels that have no rule for automatic sharding
        (splash) or require queries, keys and values to be split alike (cudnn). None is right on one device. Otherwise
        splash leaves the arrays whole on every device, and cudnn fails if they are split differently.
      implementation: None takes the first of cudnn, triton, splash, xla and chunked that accepts; a name gets that one
        or an error.

    Raises:
      ValueError: shapes that disagree.
      BackendError: (a ValueError) the named implementation cannot run this.

    Source: arXiv 2505.18522, section 2; the window as Mistral's `sliding_window`; the gates arXiv 2503.02130.
    """
    validation.check_attention(q_BTHK.shape, k_BTGK.shape, v_BTGK.shape)
    if log_f_BTH is not None:
        validation.check_per_head("log_f", log_f_BTH.shape, q_BTHK.shape)
    operands = q_BTHK, k_BTGK, v_BTGK
    options = {"window": window, "slopes": slopes, "has_gates": log_f_BTH is not None}
    kernels = backend.pick("causal_attention", BACKENDS, implementation, operands, options, order=ORDER)
    factor = numerics.softmax_scale(scale, q_BTHK.shape[-1])
    return kernels.attend(*operands, log_f_BTH, window=window, scale=factor, slopes=slopes, split=split)
