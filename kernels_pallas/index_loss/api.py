"""The loss that trains an index of key blocks, with interchangeable backends.

A query t of key head g reads the past keys of its local block and of n chosen earlier blocks, S_tg. Index scores are
I_ts = q^I_tg . k^I_s / sqrt(N), and p_t is the mean of the R = H / G query heads' attention weights over S_tg:

    L = mean over t and g of KL(p_t || softmax_{S_tg} I_t)
    dI = (softmax I - p) / (B T G),   dq^I_t = sum_s dI_ts k^I_s / sqrt(N),   dk^I_s = sum_{t, g} dI_ts q^I_tg / sqrt(N)

Only the index receives gradients. The forward pass computes them; the backward pass multiplies them by the gradient of
L. They have the checkpoint name `index_gradients`: if a rematerialisation policy saves it, they are computed once.
Without differentiation, no gradient is computed. Reverse mode only, once.

Source: arXiv 2606.13392 (MSA); arXiv 2512.02556, section 2.1 (the same loss for single keys).
"""

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from kernels_pallas import backend, validation
from kernels_pallas.batching import vary_alike
from kernels_pallas.index_loss import triton, xla
from kernels_pallas.index_loss.interface import IndexLoss

BACKENDS = (triton.BACKEND, xla.BACKEND)


def index_loss(
    index_q_BTGN: Float[Array, "B T G N"],
    index_k_BTN: Float[Array, "B T N"],
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    sel_BTGn: Int32[Array, "B T G n"],
    *,
    block_size: int,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Return the mean divergence of the index from the attention weights, in nats.

    Args:
      index_q_BTGN: index queries, fp32, bf16 or fp16 (fp64 under x64), any T >= 1.
      index_k_BTN: index keys, shared by the key heads.
      q_BTHK: queries of the attention; G divides H, query head h reads key head h // (H // G). No gradient.
      k_BTGK: keys of the attention. No gradient.
      sel_BTGn: chosen blocks: all different, before the local block, padded with -1. Not checked. No gradient.
      block_size: keys per block.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      A scalar, fp32 (fp64). Scores, softmax and sums are fp32.

    Raises:
      ValueError: shapes that disagree, or a block_size below 1.
      BackendError: (a ValueError) the chosen implementation cannot run the call.
    """
    validation.check_attention(q_BTHK.shape, k_BTGK.shape)
    validation.check_chunk_size(block_size)
    B, T, G, _ = k_BTGK.shape
    for name, x, expected in (
        ("index_q_BTGN", index_q_BTGN.shape[:3], (B, T, G)),
        ("index_k_BTN", index_k_BTN.shape, (B, T, index_q_BTGN.shape[-1])),
        ("sel_BTGn", sel_BTGn.shape[:3], (B, T, G)),
    ):
        if x != expected:
            raise ValueError(f"{name} must begin with {expected} for k_BTGK {k_BTGK.shape}; it begins with {x}")
    operands = (index_q_BTGN, index_k_BTN, q_BTHK, k_BTGK)
    options = {"block_size": block_size, "n_blocks": sel_BTGn.shape[3] + 1}
    kernels = backend.pick("index_loss", BACKENDS, implementation, operands, options)
    q_BTHK, k_BTGK, sel_BTGn = jax.lax.stop_gradient((q_BTHK, k_BTGK, sel_BTGn))
    return _loss(*vary_alike(index_q_BTGN, index_k_BTN, q_BTHK, k_BTGK, sel_BTGn), kernels, block_size)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _loss(
    index_q_BTGN: Array, index_k_BTN: Array, q: Array, k: Array, sel: Array, kernels: IndexLoss, block_size: int
) -> Array:
    return kernels.run(index_q_BTGN, index_k_BTN, q, k, sel, block_size=block_size, with_gradients=False)[0]


def _forward(
    index_q_BTGN: Array, index_k_BTN: Array, q: Array, k: Array, sel: Array, kernels: IndexLoss, block_size: int
) -> tuple[Array, tuple[Array, ...]]:
    operands = (index_q_BTGN, index_k_BTN, q, k, sel)
    loss, *gradients = kernels.run(*operands, block_size=block_size, with_gradients=True)
    return loss, checkpoint_name(tuple(gradients), "index_gradients")


def _backward(kernels: IndexLoss, block_size: int, saved: tuple[Array, ...], g: Array) -> tuple[Any, ...]:
    del kernels, block_size
    return *((g * x).astype(x.dtype) for x in saved), None, None, None


_loss.defvjp(_forward, _backward)
