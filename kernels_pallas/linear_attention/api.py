"""Linear attention with a decay per key channel, with interchangeable backends.

    S_t = diag(w_t) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t (x) v_t                            S [K, V] per head
    o_t = r_t^T S_t, or with u and without a and b  r_t^T (S_{t-1} + diag(u) k_t (x) v_t)

RWKV-6 (arXiv 2404.05892) has the bonus u. RWKV-5's decay is constant in time. GLA (arXiv 2312.06635) has neither u nor
a and b. RWKV-7 (arXiv 2503.14456) has a = -kappa, b = kappa eta. KDA (arXiv 2510.26692) has a = -w k, b = beta k, and
passes beta k as its keys. In a chunk, g is the running sum of log w from the start, g' the sum up to the previous
position, and S the state before the chunk. Readers x are r (with g, or g' if there is u) and a (with g'); writers y are
k and b (with g). Their scores x|y are

    (x|y)_ij = sum_n x_in y_jn e^{g_in - g_jn} for j < i
    (r|k)_ii = r_i . k_i, or r_i . (u k_i),   (r|b)_ii = r_i . b_i,   (a|k)_ii = (a|b)_ii = 0
    x~_i = x_i e^{g_i},   y^_j = y_j e^{g_C - g_j},   X = (I - a|b)^{-1}

    U = X ((a|k) V + a~ S)                   O = (r|k) V + (r|b) U + r~ S
    S <- diag(e^{g_C}) S + k^^T V + b^^T U

Let L be the gradient of the state after a chunk. The gradients mirror the forward pass: writers read and readers write.

    dY = X^T ((r|b)^T dO + b^ L)             dV = (r|k)^T dO + (a|k)^T dY + k^ L
    L <- diag(e^{g_C}) L + r~^T dO + a~^T dY
    d(r|k) = dO V^T,   d(r|b) = dO U^T,   d(a|k) = dY V^T,   d(a|b) = dY U^T  (none through the inverse)
    dr_i = e^{g_i} (S dO_i) + terms in d(r|k) and d(r|b), summed over j;  da likewise with dY
    dk_j = e^{g_C - g_j} (L v_j) + terms in d(r|k) and d(a|k), summed over i;  db likewise with U
    each reader adds x dx to dg (or dg'), each writer -y dy to dg, without the diagonal terms, which cancel. The last dg
    of a chunk adds e^{g_C} rowsum(S * L) and the sum over j of k_j e^{g_C - g_j} (L v_j) + b_j e^{g_C - g_j} (L u_j).

The xla backend is array code that JAX differentiates. The triton backend defines these gradients itself, in reverse
mode and once.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.linear_attention import triton, xla
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.segments import check_segments, first_tokens, keep, reset_decays
from kernels_pallas.validation import check_chunk_size

BACKENDS = (triton.BACKEND, xla.BACKEND)


def linear_attention(
    r_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_w_BTHK: Float[Array, "#B #T H K"],
    u_HK: Float[Array, "H K"] | None = None,
    initial_BHKV: Float[Array, "B H K V"] | None = None,
    *,
    low_rank: tuple[Float[Array, "B T H K"], Float[Array, "B T H K"] | None] | None = None,
    min_log_w: float = -math.inf,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs at all positions and the state after the last position.

    Args:
      r_BTHK: receptances or queries, scaled.
      k_BTHK: keys.
      v_BTHV: values; fp32, bf16 or fp16 (fp64 under x64), and any T >= 1. Matrix products use this dtype.
      log_w_BTHK: log decays, <= 0, without a lower bound; B and T may be 1 (a constant decay). Decays, u, states and
        all sums are fp32 (fp64).
      u_HK: bonus for the current token; r then reads the state before its decay. None: r reads the state after its
        decay and update.
      initial_BHKV: state before the first position; None means zero.
      low_rank: (a, b) of the low-rank part; excludes u. b None means b = k, as in KDA, and saves its products.
      min_log_w: lower bound of log w. It selects a faster path if it keeps the sum over a chunk above -59 (triton) or,
        with a low-rank part, above -80 (xla). A log w below the bound then gives wrong results.
      segments: the number of each token's document, integers [B, T] that do not decrease along T; None means one
        document. The state is zero before each later document. Excludes the faster path of `min_log_w`.
      chunk_size: positions per chunk. It does not change the result; triton uses at most 64.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      (o_BTHV in the dtype of `v_BTHV`, last_BHKV in fp32 or fp64).

    Raises:
      ValueError: a chunk size below 1, both u and a low-rank part, or segments of another shape.
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: arXiv 2404.05892 and 2503.14456.
    """
    check_chunk_size(chunk_size)
    if u_HK is not None and low_rank is not None:
        raise ValueError("linear attention has a bonus u or a low-rank part; give one of the two")
    check_segments(segments, *v_BTHV.shape[:2])
    acc = accumulation_dtype(v_BTHV, log_w_BTHK)
    first_BT, read_r_BTHK = None, r_BTHK
    if segments is not None:
        first_BT, min_log_w = first_tokens(segments), -math.inf
        log_w_BTHK = reset_decays(jnp.broadcast_to(log_w_BTHK.astype(acc), r_BTHK.shape), first_BT)
        # a, and r with a bonus, read the state before its decay.
        if low_rank is not None:
            low_rank = (keep(~first_BT, low_rank[0]), low_rank[1])
        if u_HK is not None:
            read_r_BTHK = keep(~first_BT, r_BTHK)
    if initial_BHKV is None:
        (B, _, H, K), V = r_BTHK.shape, v_BTHV.shape[-1]
        initial_BHKV = jnp.zeros((B, H, K, V), acc)
    bonus, low = () if u_HK is None else (u_HK.astype(acc),), [x for x in low_rank or () if x is not None]
    operands = (read_r_BTHK, k_BTHK, v_BTHV, log_w_BTHK.astype(acc), initial_BHKV.astype(acc), *bonus)
    options = {"chunk_size": chunk_size}
    kernels = backend.pick("linear_attention", BACKENDS, implementation, operands, options)
    r, k, v, log_w, initial, *rest = vary_alike(*operands, *low)
    u, a, b, *_ = (rest[0], None, None) if bonus else (None, *rest, None, None)
    o_BTHV, last_BHKV = kernels.run(r, k, v, log_w, u, a, b, initial, chunk_size=chunk_size, min_log_w=min_log_w)
    if first_BT is not None and u_HK is not None:
        bonus_BTH1 = jnp.sum(r_BTHK.astype(acc) * u_HK.astype(acc) * k_BTHK.astype(acc), axis=-1, keepdims=True)
        o_BTHV += keep(first_BT, bonus_BTH1 * v_BTHV.astype(acc)).astype(o_BTHV.dtype)
    return o_BTHV, last_BHKV
