"""Causal softmax attention with interchangeable backends.

The backends in order of preference:

    cudnn    cuDNN's flash attention: 16-bit inputs, NVIDIA GPUs from the A100 on
    triton   only with forget gates or segments: 16-bit or float32 inputs, compute capability 8.0 (A100) to 9.0 (H100)
    splash   JAX's splash attention, a Pallas kernel for TPUs
    xla      dense: materialises all scores, memory quadratic in T; above 256 tokens only if selected by name
    chunked  memory linear in T, on any device
"""

from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from kernels_pallas import backend, numerics, validation, xla_tiles
from kernels_pallas.attention import chunked, cudnn, splash, triton, xla
from kernels_pallas.segments import check_segments, first_tokens

BACKENDS = (cudnn.BACKEND, triton.BACKEND, splash.BACKEND, xla.BACKEND, chunked.BACKEND)
ORDER = tuple(one.name for one in BACKENDS)


def causal_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGK: Float[Array, "B T G V"],
    log_f_BTH: Float[Array, "B T H"] | None = None,
    *,
    segments: Int32[Array, "B T"] | None = None,
    window: int = 0,
    scale: float | None = None,
    slopes: tuple[float, ...] = (),
    split: PartitionSpec | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return causal softmax attention, optionally with window, ALiBi, forget gates or packed documents.

        o_i = sum_j softmax_j(q_i . k_j * scale) v_j          over 0 <= i - j < window and segments_j = segments_i

    Args:
      q_BTHK: queries, fp32, bf16 or fp16; any T >= 1.
      k_BTGK: keys; G divides H, query head h reads key-value head h // (H // G).
      v_BTGK: values, [B, T, G, V]. If V differs from K, the narrower operands are padded with zeros, because most
        backends need equal widths. A backend that refuses a head dim means the larger of the two.
      log_f_BTH: logarithms of forget gates, <= 0, fp32, one per position and query head. Their sum over positions j + 1
        to i is added to the scaled score; they have a gradient. None means no gates. Only triton, xla and chunked have
        gates.
      segments: number of each token's document, not decreasing along time. A query reads only keys of its document, and
        no output or gradient of a document depends on another document, in any bit. None means one document. On a GPU
        only triton, xla and chunked have segments.
      window: number of keys that a query sees, including its position; 0 for the whole past.
      scale: factor of the scores; 1 / sqrt(K) when None.
      slopes: ALiBi slopes, one per query head: -slope * (i - j) is added to the scaled fp32 scores.
      split: sharding of [B, T, G, K] over the current mesh, for kernels without a rule for automatic sharding (splash)
        or with a rule that requires equal shardings of queries, keys and values (cudnn). None is right on one device.
        On several devices, None makes splash keep whole arrays on every device, and cudnn fails if the shardings
        differ.
      implementation: None takes the first of cudnn, triton, splash, xla and chunked that accepts; a name selects that
        backend or raises an error.

    Raises:
      ValueError: shapes that disagree.
      BackendError: (a ValueError) the selected implementation cannot run this.

    Source: arXiv 2505.18522, section 2; window as in Mistral's `sliding_window`; gates arXiv 2503.02130.
    """
    validation.check_attention(q_BTHK.shape, k_BTGK.shape, v_BTGK.shape)
    if log_f_BTH is not None:
        validation.check_per_head("log_f", log_f_BTH.shape, q_BTHK.shape)
    check_segments(segments, *q_BTHK.shape[:2])
    key_dim, value_dim = q_BTHK.shape[-1], v_BTGK.shape[-1]
    if key_dim != value_dim:
        width = max(key_dim, value_dim)
        q_BTHK, k_BTGK, v_BTGK = (xla_tiles.pad_to(x, width, axis=3) for x in (q_BTHK, k_BTGK, v_BTGK))
    operands = q_BTHK, k_BTGK, v_BTGK
    options: dict[str, Any] = {"window": window, "slopes": slopes, "has_gates": log_f_BTH is not None}
    packed = {}
    if segments is not None:
        options, packed = options | {"has_segments": True}, {"segments_BT": segments}
        if log_f_BTH is not None:  # this gate is between two documents: no query reads across it
            log_f_BTH = jnp.where(first_tokens(segments)[..., None], 0, log_f_BTH)
    kernels = backend.pick("causal_attention", BACKENDS, implementation, operands, options, order=ORDER)
    factor = numerics.softmax_scale(scale, key_dim)
    o_BTHV = kernels.attend(*operands, log_f_BTH, window=window, scale=factor, slopes=slopes, split=split, **packed)
    return o_BTHV if value_dim >= key_dim else o_BTHV[..., :value_dim]
