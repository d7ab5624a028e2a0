"""Top-1 Element attention as a differentiable function over interchangeable backends.

    forward   o_i = v[argmax_{j <= i} q_i . k_j]                 one value, exactly
    backward  the softmax's gradient to q and k (straight-through), and to v the one of `v_grad`

The straight-through matrix is stop_gradient(onehot - p) + p (arXiv 2505.18522, Top-1 Element). Written out
like that it needs O(T^2) memory, and in bf16 1 - p + p is not 1; here the forward value is a copy of one v.
The paper does not define the gradient of v. "hard" is the literal derivative of that expression, and the true
derivative of the function evaluated. "soft" applies the estimator to the output instead, so values that no query chose
learn too.

Not differentiated, the op skips the softmax and its product with v. Differentiated, the forward rule names
its residuals `top1_selection` (the best key), `attention_lse` and `attention_out` (the soft output; the hard
one is a cheap gather) for rematerialisation policies. Reverse mode only, once.
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
    """The static half of a call."""

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
    """Return for every query and head the value of its best key so far, with a softmax gradient.

    Args:
      q_BTHK: queries, fp32, bf16 or fp16 (fp64 under x64); any T >= 1.
      k_BTGK: keys; G divides H, query head h reads key-value head h // (H // G).
      v_BTGV: values.
      scale: of the scores; 1 / sqrt(K) when None. It does not change the output, only the gradient.
      v_grad: "hard" (do goes to the value that was returned) or "soft" (p^T do).
      implementation: None picks the best backend that can run this; a name gets that one or an error.

    Returns:
      o_BTHV, each row bit for bit a row of v; ties go to the earliest key.

    Raises:
      ValueError: shapes that disagree, an unknown v_grad.
      BackendError: (a ValueError) the named implementation cannot run this.

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
