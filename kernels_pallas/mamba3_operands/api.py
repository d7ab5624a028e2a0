"""Mamba-3's recurrence operands, with interchangeable differentiable backends.

    phi_t = phi_{t-1} + turn_t dt_t       turns, modulo 1, per head and pair of channels; phi_{-1} is `start`
    k_t = rotate(B_{t-1} + b_B, phi_{t-1}),   q_t = rotate(C_t + b_C, phi_t)
    own_t = (C_t + b_C) . (B_t + b_B)         per head

rotate(x, phi) turns the channel pairs (2m, 2m + 1), m < R, by 2 pi phi_m and keeps the other channels. Heads share B,
C and turn. k_t is made from the previous token, because this token's input enters the state at token t
(`seqjax/mixers/mamba3.py`); B_{-1} is `before`. Let e be a biased B or C, e' the biased C or B of the same token, and
gy the gradient of e's rotation y. Backward pass, with `sum` over heads:

    de = rotate(gy, -phi) + gown e',   dB, dC = sum de,   dbias = sum over batch and time of de
    dphi_m = 2 pi (z_{2m+1} e_{2m} - z_{2m} e_{2m+1}), z = rotate(gy, -phi), of k and q with the same angle
    dturn_s = sum dt_s r_s,   ddt_s = r_s . turn_s,   r_s = dphi_s + dphi_{s+1} + ...

The xla backend is array code that JAX differentiates. The triton backend writes k and q once and reads their gradients
once; it keeps its inputs for the backward pass.
"""

from typing import Any

from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.mamba3_operands import triton, xla
from kernels_pallas.mamba3_operands.interface import Operands
from kernels_pallas.numerics import accumulation_dtype

BACKENDS = (triton.BACKEND, xla.BACKEND)


def mamba3_operands(
    b_BTN: Float[Array, "B T N"],
    c_BTN: Float[Array, "B T N"],
    turn_BTR: Float[Array, "B T R"],
    dt_BTH: Float[Array, "B T H"],
    *,
    b_bias_HN: Float[Array, "H N"],
    c_bias_HN: Float[Array, "H N"],
    before_BN: Float[Array, "B N"],
    start_BHR: Float[Array, "B H R"],
    implementation: str | None = None,
) -> Operands:
    """Return the operands of Mamba-3's recurrence.

    Args:
      b_BTN: normed B, shared by the heads; fp32, bf16 or fp16 (fp64 under x64), any T >= 1.
      c_BTN: normed C, in the same dtype.
      turn_BTR: turns per step size of R <= N / 2 channel pairs, shared by the heads; fp32 (fp64).
      dt_BTH: step sizes, fp32 (fp64).
      b_bias_HN: biases of B per head; cast to fp32 (fp64).
      c_bias_HN: biases of C per head; cast to fp32 (fp64).
      before_BN: the B of the token before the first; cast to the dtype of `b_BTN`.
      start_BHR: the angles of this token, in turns; cast to fp32 (fp64).
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      `Operands`: `k_BTHN` and `q_BTHN` in the dtype of `b_BTN`, rounded once; `own_BTH`, the products of each token's
      biased B and C, and `turns_BHR`, the angles of the last token in turns, both fp32 (fp64).

    Raises:
      ValueError: shapes that disagree.
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: arXiv 2603.15569; public implementation: state-spaces/mamba, `mamba_ssm/modules/mamba3.py`.
    """
    acc, (B, T, N), H, R = accumulation_dtype(b_BTN), b_BTN.shape, dt_BTH.shape[-1], turn_BTR.shape[-1]
    if 2 * R > N:
        raise ValueError(f"turn_BTR has {R} channel pairs; {N} channels of b_BTN have at most {N // 2}")
    expected: dict[str, tuple[Any, tuple]] = {"c_BTN": (c_BTN, (B, T, N)), "turn_BTR": (turn_BTR, (B, T, R))}
    expected |= {"dt_BTH": (dt_BTH, (B, T, H)), "b_bias_HN": (b_bias_HN, (H, N)), "c_bias_HN": (c_bias_HN, (H, N))}
    expected |= {"before_BN": (before_BN, (B, N)), "start_BHR": (start_BHR, (B, H, R))}
    for name, (x, wanted) in expected.items():
        if x.shape != wanted:
            raise ValueError(f"{name} must be {wanted} for b_BTN {b_BTN.shape}; it is {x.shape}")
    kernels = backend.pick("mamba3_operands", BACKENDS, implementation, (b_BTN, c_BTN, turn_BTR, dt_BTH), {})
    wide = (x.astype(acc) for x in (turn_BTR, dt_BTH, b_bias_HN, c_bias_HN))
    arrays = (b_BTN, c_BTN, *wide, before_BN.astype(b_BTN.dtype), start_BHR.astype(acc))
    return kernels.run(*vary_alike(*arrays))
