"""The short depthwise convolution over time that precedes the recurrences of Mamba, DeltaNet and Based.

It is causal and computed in float32 (`kernels_pallas.short_conv`). In decoding, its last inputs are carried from one
call to the next.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

import kernels_pallas
from seqjax.nn.initializers import Init, uniform
from seqjax.nn.params import param
from seqjax.sharding import rows_to_time, time_pieces, time_to_rows
from seqjax.types import Array


class ShortConv(nnx.Module):
    """A depthwise causal convolution, y_t = act(sum_i w_i x_{t - W + 1 + i} + b).

    The last of the W taps multiplies the current token. Taps and bias are drawn from U(+-1 / sqrt(W)), as in torch's
    Conv1d, unless `init` is given. The activation is SiLU, or none with `silu=False`. With `l2_heads`, y of each of so
    many heads is then divided by its norm, as `layers.l2_normalize` does, and multiplied by `scale`.
    """

    def __init__(
        self,
        dim: int,
        *,
        width: int = 4,
        bias: bool = False,
        silu: bool = True,
        l2_heads: int | None = None,
        scale: float = 1.0,
        init: Init | None = None,
        axis: str | None = "mlp",
        rngs: nnx.Rngs,
    ):
        init = init or uniform(width**-0.5)
        self.silu, self.l2_heads, self.scale = silu, l2_heads, scale
        self.w = param(rngs, init, (dim, width), (axis, "conv"))
        self.b = param(rngs, init, (dim,), (axis,)) if bias else None

    def __call__(self, x_BTE: Array, last_BWE: Array | None = None) -> Array:
        """Map [B, T, E] to [B, T, E]; `last_BWE` (default zero) holds the W - 1 inputs before the first."""
        n_past = self.w.shape[1] - 1
        n_batch, seq_len, _ = x_BTE.shape
        n_pieces = time_pieces(x_BTE)
        if n_pieces > 1 and n_past <= seq_len // n_pieces:
            last_BWE = self.init_cache(n_batch, x_BTE.dtype) if last_BWE is None else last_BWE
            x_BSE = time_to_rows(x_BTE, last_BWE.astype(x_BTE.dtype))
            last_BWE, x_BTE = x_BSE[:, :n_past], x_BSE[:, n_past:]
        y_BTE = kernels_pallas.short_conv(
            x_BTE,
            self.w[...],
            None if self.b is None else self.b[...],
            last_BWE,
            silu=self.silu,
            l2_heads=self.l2_heads,
            scale=self.scale,
        )
        return rows_to_time(y_BTE, n_batch)

    def init_cache(self, batch: int, dtype: Any) -> Array:
        """Return zeros [B, W - 1, E] in place of earlier inputs."""
        return jnp.zeros((batch, self.w.shape[1] - 1, self.w.shape[0]), dtype)

    def extend(self, x_BTE: Array, last_BWE: Array) -> tuple[Array, Array]:
        """Return the convolution of inputs that follow `last_BWE`, and the last W - 1 inputs for the next call."""
        seen = jnp.concatenate([last_BWE, x_BTE.astype(last_BWE.dtype)], axis=1)
        return self(x_BTE, last_BWE), seen[:, x_BTE.shape[1] :]
