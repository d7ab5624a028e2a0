"""Linear attention with a decay per channel: RWKV-5, RWKV-6 and GLA.

    y_t = r_t (S_{t-1} + diag(u) k_t^T v_t),   S_t = diag(w_t) S_{t-1} + k_t^T v_t        S [K, V] per head

Peng et al., arXiv 2404.05892; u is the bonus for the current token, and RWKV-5's decay is constant in time. Without u
the state is read after the update, y_t = r_t S_t, as in GLA (arXiv 2312.06635). `kernels_pallas/linear_attention` has
the chunked form, its gradient, and the XLA and Triton backends. Decays, states and sums are float32; products use the
dtype of v.
"""

import jax.numpy as jnp
from jaxtyping import Float, Int

import kernels_pallas
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 64


def wkv6(
    r_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_w_BTHK: Float[Array, "#B #T H K"],
    u_HK: Float[Array, "H K"] | None,
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    return_state: bool = False,
    segments: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Return the outputs and, with `return_state`, the final state.

    The outputs have the dtype of `v_BTHV`, the state is float32. `log_w_BTHK` <= 0 has no lower bound; pass it in
    float32. Its B and T may be 1 (a constant decay). The result does not depend on `chunk_size` (default 64, at most
    T). Without `u_HK` the recurrence is GLA's. `segments` and `implementation` are as in `kernels_pallas`.
    """
    if v_BTHV.shape[1] == 1 and return_state:  # decoding
        acc = kernels_pallas.accumulation_dtype(v_BTHV, log_w_BTHK)
        shape = (*r_BTHK.shape[:1], *r_BTHK.shape[2:], v_BTHV.shape[-1])
        s_BHKV = jnp.zeros(shape, acc) if initial_state is None else initial_state.astype(acc)
        log_w_BHK = log_w_BTHK[:, 0].astype(acc)
        y_BHV, s_BHKV = _step(r_BTHK[:, 0], k_BTHK[:, 0], v_BTHV[:, 0], log_w_BHK, u_HK, s_BHKV)
        return y_BHV[:, None], s_BHKV
    y_BTHV, s_BHKV = kernels_pallas.linear_attention(
        time_to_heads(r_BTHK),
        time_to_heads(k_BTHK),
        time_to_heads(v_BTHV),
        time_to_heads(log_w_BTHK),
        u_HK,
        initial_state,
        segments=None if segments is None else gather_time(segments),
        chunk_size=min(chunk_size or CHUNK, v_BTHV.shape[1]),
        implementation=implementation,
    )
    y_BTHV = heads_to_time(y_BTHV)
    return (y_BTHV, s_BHKV) if return_state else y_BTHV


def _step(
    r_BHK: Array, k_BHK: Array, v_BHV: Array, log_w_BHK: Array, u_HK: Array | None, s_BHKV: Array
) -> tuple[Array, Array]:
    """Return the output and the state of one token.

    Unlike the chunked form, it reads and writes little more than the state.
    """
    acc = s_BHKV.dtype
    r_BHK1, k_BHK1, v_BH1V = r_BHK.astype(acc)[..., None], k_BHK.astype(acc)[..., None], v_BHV.astype(acc)[:, :, None]
    next_BHKV = jnp.exp(log_w_BHK)[..., None] * s_BHKV + k_BHK1 * v_BH1V
    read_BHKV = next_BHKV if u_HK is None else s_BHKV + u_HK.astype(acc)[..., None] * k_BHK1 * v_BH1V
    return jnp.sum(r_BHK1 * read_BHKV, axis=-2).astype(v_BHV.dtype), next_BHKV
