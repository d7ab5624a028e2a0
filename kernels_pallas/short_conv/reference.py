"""Token-by-token short convolution in its inputs' precision; the tests' oracle."""

import jax
import jax.numpy as jnp
from jax import Array


def short_conv(
    x_BTE: Array,
    w_EW: Array,
    b_E: Array | None,
    last_BWE: Array | None,
    *,
    silu: bool,
    l2_heads: int | None = None,
    scale: float = 1.0,
    eps: float = 1e-6,
) -> Array:
    """Compute `kernels_pallas.short_conv` without intermediate rounding."""
    (B, T, E), W = x_BTE.shape, w_EW.shape[1]
    last_BWE = jnp.zeros((B, W - 1, E), x_BTE.dtype) if last_BWE is None else last_BWE
    seen_BSE = jnp.concatenate([last_BWE, x_BTE], axis=1)
    y = []
    for t in range(T):
        z_BE = jnp.einsum("bwe,ew->be", seen_BSE[:, t : t + W], w_EW) + (0 if b_E is None else b_E)
        s_BE = jax.nn.silu(z_BE) if silu else z_BE
        if l2_heads is not None:
            s_BHK = s_BE.reshape(B, l2_heads, -1)
            s_BE = (scale * s_BHK / jnp.sqrt(jnp.sum(s_BHK**2, -1, keepdims=True) + eps)).reshape(B, E)
        y.append(s_BE)
    return jnp.stack(y, axis=1)
