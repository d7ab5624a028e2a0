"""Post-recurrence norm and output gate, with interchangeable backends.

    y = (norm(x) + s a) act(g)        norm per head: DeltaNet, Gated DeltaNet, KDA, GLA, RWKV-5, 6 and 7
    y = norm((x + s a) act(g))        gate first, one norm over all channels of a token: Mamba-2
    norm(x) = x / sqrt(mean x^2 + eps) gain,   or (x - mean x) / sqrt(var x + eps) gain + bias

The skip term s a adds a second operand: RWKV-7's values with a factor s = r . (k u) per token and head, or Mamba-2's
inputs with one factor per head. Gate and skip are optional. Let u be the norm before gain and bias, r the divisor of x,
w the gate's operand, and dw = dy act(g) (gate first: dz act(g), with dz the gradient for the norm's operand):

    dx = (dn gain - mean(dn gain) - u mean(dn gain u)) / r        the first mean only with a bias
    dgain = sum dn u,   dbias = sum dn                            dn = dw (gate first: dy), sums over tokens
    dg = dy w act'(g)  (gate first: dz w act'(g)),   da = s dw,   ds = a . dw

`residual_norm` returns x and norm(x) over all channels; its backward pass adds both gradients before rounding. Both
backends keep only the inputs for the backward pass (xla also one or two norm statistics per token and head). All
intermediate values are float32.
"""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.head_norm import triton, xla
from kernels_pallas.head_norm.interface import Call
from kernels_pallas.head_norm.reference import ACTIVATIONS
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.validation import check_choice

BACKENDS = (triton.BACKEND, xla.BACKEND)


def head_norm(
    x_BTHV: Float[Array, "B T H V"],
    gate_BTHV: Float[Array, "B T H V"] | None = None,
    skip: tuple[Float[Array, "B T H V"], Float[Array, "#B #T H"]] | None = None,
    *,
    gain_HV: Float[Array, "#H V"],
    bias_HV: Float[Array, "#H V"] | None = None,
    activation: str = "silu",
    gate_first: bool = False,
    eps: float,
    is_split: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T H V"]:
    """Return the normalised and gated recurrence outputs, rounded once.

    The result has the dtype of `x_BTHV`.

    Args:
      x_BTHV: recurrence outputs; fp32, bf16 or fp16 (fp64 under x64).
      gate_BTHV: gate projection before the activation; None means no gate.
      skip: (a [B, T, H, V], factors s [B, T, H] whose B and T may be 1); s a is added before the gate.
      gain_HV: gains after the norm; [1, V] shares them between heads. All parameters and factors are cast to fp32
        (fp64).
      bias_HV: biases after the norm. With a bias the norm subtracts the mean (LayerNorm), without one it does not.
      activation: activation of the gate: "silu", "sigmoid" or "none".
      gate_first: gate before the norm, and normalise over all heads of a token.
      eps: added to the mean square; must be above 0.
      is_split: whether devices share the channels of a norm over all heads; only xla supports this.
      implementation: backend name; None picks the best backend that can run the call.

    Raises:
      ValueError: an unknown activation, or an eps that is not above 0.
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: arXiv 2405.21060 (gate first), 2404.05892 and 2503.14456 (with a bias), 2412.06464.
    """
    check_choice("activation", activation, ACTIVATIONS)
    call = Call(activation, gate_first, eps)
    y_BTHV: Any = _run(x_BTHV, gate_BTHV, skip, gain_HV, bias_HV, call, implementation, is_split=is_split)
    return y_BTHV


def residual_norm(
    x_BTD: Float[Array, "B T D"],
    *,
    gain_D: Float[Array, "D"],
    bias_D: Float[Array, "D"] | None = None,
    eps: float,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Return x and its norm y over all channels, for a residual stream x + f(y).

    The backward pass adds the residual gradient to the norm's gradient in the same pass over memory. y has the dtype
    `dtype`, by default the dtype of x. `bias_D` makes the norm a LayerNorm. Other arguments and errors: `head_norm`.
    """
    x_BT1D, gain_1D = x_BTD[:, :, None], gain_D[None]
    bias_1D = None if bias_D is None else bias_D[None]
    name = None if dtype is None else jnp.dtype(dtype).name
    call = Call("none", gate_first=False, eps=eps, with_input=True, dtype=name)
    x_BT1D, y_BT1D = _run(x_BT1D, None, None, gain_1D, bias_1D, call, implementation, is_split=False)
    return x_BT1D[:, :, 0], y_BT1D[:, :, 0]


def _run(
    x_BTHV: Array,
    gate_BTHV: Array | None,
    skip: tuple[Array, Array] | None,
    gain_HV: Array,
    bias_HV: Array | None,
    call: Call,
    implementation: str | None,
    *,
    is_split: bool,
) -> Array | tuple[Array, Array]:
    """Run a call on the chosen backend, or on the best one that can run it."""
    if not call.eps > 0:
        raise ValueError(f"eps must be above 0, got {call.eps}: a head of zeros would be divided by zero")
    acc = accumulation_dtype(x_BTHV)
    data = [x for x in (x_BTHV, gate_BTHV, None if skip is None else skip[0]) if x is not None]
    wide = [x.astype(acc) for x in (None if skip is None else skip[1], gain_HV, bias_HV) if x is not None]
    options = {"gate_first": call.gate_first, "is_split": is_split, "n_data": len(data)}
    kernels = backend.pick("head_norm", BACKENDS, implementation, (*data, *wide), options)
    arrays = list(vary_alike(*data, *wide))
    x, gate = arrays.pop(0), None if gate_BTHV is None else arrays.pop(0)
    both = None if skip is None else (arrays.pop(0), arrays.pop(0))
    gain, *bias = arrays
    return kernels.run(x, gate, both, gain, bias[0] if bias else None, call)
