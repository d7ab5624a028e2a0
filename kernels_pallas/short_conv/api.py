"""The short convolution as a differentiable op with interchangeable backends.

    z_t = sum_i w_i x_{t - W + 1 + i} + b,   s_t = silu(z_t) or z_t
    y_t = s_t, or for every head scale * s_t / sqrt(sum of s_t^2 + eps)

The last tap multiplies the current token. With r = 1 / sqrt(sum of s^2 + eps), p = sigmoid(z) and y's gradient g,

    ds = scale r (g - s r^2 sum of g s),   dz = ds (p + s (1 - p)),
    dx_t = sum_i w_i dz_{t + W - 1 - i},   dw_i = sum_t dz_t x_{t - W + 1 + i},   db = sum_t dz_t

The backward pass keeps only x (xla also the inputs of its norm) and computes z again.
"""

from jaxtyping import Array, Float, Int

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.segments import check_segments, reach
from kernels_pallas.short_conv import triton, xla

BACKENDS = (triton.BACKEND, xla.BACKEND)


def short_conv(
    x_BTE: Float[Array, "B T E"],
    w_EW: Float[Array, "E W"],
    b_E: Float[Array, "E"] | None = None,
    last_BWE: Float[Array, "B past E"] | None = None,
    *,
    silu: bool,
    l2_heads: int | None = None,
    scale: float = 1.0,
    eps: float = 1e-6,
    segments: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T E"]:
    """Convolve every channel over time, with optional SiLU and norm.

    Args:
      x_BTE: inputs; fp32, bf16 or fp16 (fp64 under x64), any T >= 1. All arithmetic is fp32 (fp64).
      w_EW: taps per channel, W >= 1.
      b_E: bias; None means zero.
      last_BWE: the W - 1 inputs before the first position; None means zero. Rounded to the dtype of `x_BTE`.
      silu: apply SiLU after the convolution.
      l2_heads: number of heads with E / l2_heads consecutive channels, each divided by its L2 norm; None: no norm.
      scale: factor for normalised heads.
      eps: added to the sum of squares.
      segments: the number of each token's document, integers [B, T] that do not decrease along T; None means one
        document. A token reads only the inputs of its document.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      y_BTE in the dtype of `x_BTE`. triton rounds once; xla also rounds before the norm.

    Raises:
      ValueError: shapes that disagree, heads that do not divide the channels, or a scale without heads.
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: Mamba's convolution, arXiv 2312.00752; with the norm, Gated DeltaNet's, arXiv 2412.06464.
    """
    (B, _, E), W = x_BTE.shape, w_EW.shape[1]
    for name, x, shape in (("w_EW", w_EW, (E, W)), ("b_E", b_E, (E,)), ("last_BWE", last_BWE, (B, W - 1, E))):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must be {shape} for x_BTE {x_BTE.shape}; it is {x.shape}")
    if l2_heads is None and scale != 1.0:
        raise ValueError(f"scale={scale} applies only to normalised heads; set l2_heads, or scale the outputs")
    if l2_heads is not None and (l2_heads < 1 or E % l2_heads):
        raise ValueError(f"{l2_heads} heads do not divide {E} channels")
    check_segments(segments, *x_BTE.shape[:2])
    acc = accumulation_dtype(x_BTE)
    by_name = {"w": w_EW.astype(acc)}
    if b_E is not None:
        by_name["b"] = b_E.astype(acc)
    if last_BWE is not None:
        by_name["last"] = last_BWE.astype(x_BTE.dtype)
    options = {"silu": silu, "l2_heads": l2_heads}
    reaches = () if segments is None else (reach(segments, W - 1),)
    limits = options if segments is None else options | {"has_segments": True}
    kernels = backend.pick("short_conv", BACKENDS, implementation, (x_BTE, *by_name.values()), limits)
    x_BTE, *rest = vary_alike(x_BTE, *by_name.values(), *reaches)
    n = len(by_name)
    by_name = dict(zip(by_name, rest[:n], strict=True))
    operands = (x_BTE, by_name["w"], by_name.get("b"), by_name.get("last"), *rest[n:])
    return kernels.run(*operands, **options, scale=scale, eps=eps)
