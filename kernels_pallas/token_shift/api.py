"""RWKV's token shift as a differentiable op with interchangeable backends.

    y_n,t = x_t + (x_{t-1} - x_t) m_n,t,   m_n,t = mu_n, or mu_n + move_n,t        n = 1 ... N branches

With g_n the gradient of y_n,

    dx_t = sum_n (g_n,t (1 - m_n,t) + g_n,t+1 m_n,t+1),   dlast = sum_n g_n,0 m_n,0
    dmove_n,t = g_n,t (x_{t-1} - x_t),   dmu_n = sum over tokens of dmove_n,t

Both backends keep only the inputs for the backward pass.
"""

from jaxtyping import Array, Float, Int

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.segments import check_segments, reach
from kernels_pallas.token_shift import triton, xla

BACKENDS = (triton.BACKEND, xla.BACKEND)


def token_shift(
    x_BTD: Float[Array, "B T D"],
    last_BD: Float[Array, "B D"] | None,
    mus: tuple[Float[Array, "D"], ...],
    moves_NBTD: Float[Array, "N B T D"] | None = None,
    *,
    segments: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], ...]:
    """Return each input interpolated with the previous input, once per `mus` entry.

    Args:
      x_BTD: inputs; fp32, bf16 or fp16 (fp64 under x64), any T >= 1.
      last_BD: input before the first position; None means zero. It and `moves_NBTD` are rounded to the dtype of
        `x_BTD`.
      mus: weight of the previous input per channel, one array per branch; N >= 1.
      moves_NBTD: per-token offsets of `mus` (RWKV-6); None means zero.
      segments: the number of each token's document, integers [B, T] that do not decrease along T; None means one
        document. The input before a later document is zero.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      N arrays [B, T, D] in the dtype of `x_BTD`. triton computes in fp32 and rounds once; xla computes in that dtype.

    Raises:
      ValueError: empty `mus`, or shapes that disagree.
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: Peng et al., arXiv 2404.05892 (RWKV-5 and 6) and 2503.14456 (RWKV-7).
    """
    (B, T, D), N = x_BTD.shape, len(mus)
    if not mus:
        raise ValueError("mus is empty; pass one array [D] per branch")
    optional = {"last_BD": (last_BD, (B, D)), "moves_NBTD": (moves_NBTD, (N, B, T, D))}
    for name, (x, shape) in ({f"mus[{n}]": (mu, (D,)) for n, mu in enumerate(mus)} | optional).items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must be {shape} for x_BTD {x_BTD.shape}; it is {x.shape}")
    check_segments(segments, B, T)
    data = [x.astype(x_BTD.dtype) for x in (last_BD, moves_NBTD) if x is not None]
    wide = [mu.astype(accumulation_dtype(x_BTD)) for mu in mus]
    reaches = () if segments is None else (reach(segments, 1),)
    options = {"branches": N} if segments is None else {"branches": N, "has_segments": True}
    kernels = backend.pick("token_shift", BACKENDS, implementation, (x_BTD, *data, *wide), options)
    x_BTD, *arrays = vary_alike(x_BTD, *data, *wide, *reaches)
    last_BD = None if last_BD is None else arrays.pop(0)
    moves_NBTD = None if moves_NBTD is None else arrays.pop(0)
    return kernels.run(x_BTD, last_BD, tuple(arrays[:N]), moves_NBTD, *arrays[N:])
