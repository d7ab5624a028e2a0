"""Top-1 Element attention, differentiable, with interchangeable backends.

    forward   o_i = v[argmax_{j <= i} q_i . k_j]                 a bit-exact copy of a value
    backward  the softmax gradient for q and k (straight-through), and the `v_grad` gradient for v

The straight-through matrix is stop_gradient(onehot - p) + p (arXiv 2505.18522, Top-1 Element). A literal implementation
needs O(T^2) memory, and in bf16 1 - p + p is not 1; here the forward pass copies a row of v. The paper does not define
the gradient of v. "hard" is the derivative of the straight-through expression, and also of the forward function. "soft"
applies the estimator to the output, so values that no query chose also learn.

Without differentiation, the op skips the softmax and its product with v. With differentiation, the residuals have
checkpoint names for rematerialisation policies: `top1_selection` (the best key), `attention_lse`, and `attention_out`
(the soft output; the hard output is a cheap gather). Reverse mode only, once.
"""

from functools import partial
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from kernels_pallas import backend, numerics, validation
from kernels_pallas.top1_element import triton, xla
from kernels_pallas.top1_element.interface import ElementAttention

BACKENDS = (triton.BACKEND, xla.BACKEND)
V_GRADS = ("hard", "soft")


class Call(NamedTuple):
    """The static arguments of a call."""

    kernels: ElementAttention
    scale: float
    v_grad: str


def top1_element_attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTGK: Float[Array, "B T G K"],
    v_BTGV: Float[Array, "B T G V"],
    *,
    scale: float | None = None,
    v_grad: str = "hard",
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return for each query and head the value of its best key so far.

    The gradient is a softmax gradient.

    Args:
      q_BTHK: queries, fp32, bf16 or fp16 (fp64 under x64); any T >= 1.
      k_BTGK: keys; G divides H, query head h reads key-value head h // (H // G).
      v_BTGV: values.
      scale: factor of the scores; 1 / sqrt(K) when None. A positive scale changes only the gradient, not the output.
      v_grad: "hard" (do goes to the returned value) or "soft" (p^T do).
      implementation: None picks the best backend that can run this; a name selects that backend or raises an error.

    Returns:
      o_BTHV, each row bit for bit a row of v; ties go to the earliest key.

    Raises:
      ValueError: shapes that disagree, an unknown v_grad.
      BackendError: (a ValueError) the selected implementation cannot run this.

    Source: arXiv 2505.18522, Top-1 Element.
    """
    validation.check_attention(q_BTHK.shape, k_BTGK.shape, v_BTGV.shape)
    validation.check_choice("v_grad", v_grad, V_GRADS)
    operands = (q_BTHK, k_BTGK, v_BTGV)
    kernels = backend.pick("top1_element_attention", BACKENDS, implementation, operands, {"v_grad": v_grad})
    call = Call(kernels, numerics.softmax_scale(scale, q_BTHK.shape[-1]), v_grad)
    return _attention(q_BTHK, k_BTGK, v_BTGV, call)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, call: Call) -> Array:
    return call.kernels.evaluate(q_BTHK, k_BTGK, v_BTGV, scale=call.scale)


def _forward(q_BTHK: Array, k_BTGK: Array, v_BTGV: Array, call: Call) -> tuple[Array, tuple]:
    index_BTH, lse_BTH, soft_BTHV = call.kernels.forward(q_BTHK, k_BTGK, v_BTGV, scale=call.scale)
    index_BTH = checkpoint_name(index_BTH, "top1_selection")
    lse_BTH = checkpoint_name(lse_BTH, "attention_lse")
    soft_BTHV = checkpoint_name(soft_BTHV, "attention_out")
    o_BTHV = call.kernels.take_values(v_BTGV, index_BTH)
    return o_BTHV, (q_BTHK, k_BTGK, v_BTGV, index_BTH, lse_BTH, soft_BTHV)


def _backward(call: Call, saved: tuple, do_BTHV: Array) -> tuple[Array, Array, Array]:
    q_BTHK, k_BTGK, v_BTGV, index_BTH, lse_BTH, soft_BTHV = saved
    operands = (q_BTHK, k_BTGK, v_BTGV, index_BTH, lse_BTH, soft_BTHV, do_BTHV)
    return call.kernels.backward(*operands, scale=call.scale, v_grad=call.v_grad)


_attention.defvjp(_forward, _backward)
