"""The short depthwise convolution over time, as in Mamba, DeltaNet and Based.

It is causal and computed in float32 (`kernels_pallas.short_conv`). In decoding, each call passes its last inputs to the
next call. `Canon` adds a residual connection; attention and the model's block can use it.
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

    The last of the W taps multiplies the current token. Without `init`, taps and bias are drawn from U(+-1 / sqrt(W)),
    as in torch's Conv1d. The activation is SiLU, or none with `silu=False`. With `l2_heads`, y is split into that
    number of heads, L2-normalised per head like `layers.l2_normalize`, and multiplied by `scale`. With width None there
    is no convolution, and activation and norm apply to x_t.
    """

    def __init__(
        self,
        dim: int,
        *,
        width: int | None = 4,
        bias: bool = False,
        silu: bool = True,
        l2_heads: int | None = None,
        scale: float = 1.0,
        init: Init | None = None,
        axis: str | None = "mlp",
        rngs: nnx.Rngs,
    ):
        self.dim, self.past = dim, (width or 1) - 1
        self.silu, self.l2_heads, self.scale = silu, l2_heads, scale
        init = init or uniform((self.past + 1) ** -0.5)
        self.w = param(rngs, init, (dim, width), (axis, "conv")) if width else None
        self.b = param(rngs, init, (dim,), (axis,)) if bias else None

    @property
    def taps(self) -> Array:
        """The taps of each channel, float32 [E, W]."""
        return jnp.ones((self.dim, 1)) if self.w is None else self.w[...]

    def __call__(self, x_BTE: Array, last_BWE: Array | None = None, segments: Array | None = None) -> Array:
        """Map [B, T, E] to [B, T, E].

        `last_BWE` (default zero) holds the W - 1 inputs before the first. `segments`, int32 [B, T], is the number of
        each token's document; a token reads only inputs of its document.
        """
        n_past = self.past
        n_batch, seq_len, _ = x_BTE.shape
        n_pieces = time_pieces(x_BTE)
        implementation = None
        if n_pieces > 1 and segments is not None:
            implementation = "xla"  # it passes the last inputs of a time shard to the next device
        elif n_pieces > 1 and n_past <= seq_len // n_pieces:
            last_BWE = self.init_cache(n_batch, x_BTE.dtype) if last_BWE is None else last_BWE
            x_BSE = time_to_rows(x_BTE, last_BWE.astype(x_BTE.dtype))
            last_BWE, x_BTE = x_BSE[:, :n_past], x_BSE[:, n_past:]
        y_BTE = kernels_pallas.short_conv(
            x_BTE,
            self.taps,
            None if self.b is None else self.b[...],
            last_BWE,
            silu=self.silu,
            l2_heads=self.l2_heads,
            scale=self.scale,
            segments=segments,
            implementation=implementation,
        )
        return rows_to_time(y_BTE, n_batch)

    def init_cache(self, batch: int, dtype: Any) -> Array:
        """Return zeros [B, W - 1, E] as the inputs before the first."""
        return jnp.zeros((batch, self.past, self.dim), dtype)

    def extend(self, x_BTE: Array, last_BWE: Array | None, segments: Array | None = None) -> tuple[Array, Any]:
        """Convolve inputs that follow `last_BWE`; also return the last W - 1 inputs.

        The next call receives these as `last_BWE`. In training both are None.
        """
        if last_BWE is None:
            return self(x_BTE, segments=segments), None
        inputs = jnp.concatenate([last_BWE, x_BTE.astype(last_BWE.dtype)], axis=1)
        return self(x_BTE, last_BWE, segments), inputs[:, x_BTE.shape[1] :]


class Canon(ShortConv):
    """y_t = x_t + sum_{i < 4} w_i x_{t - 3 + i}, without bias or activation.

    Allen-Zhu, arXiv 2512.17351.
    """

    def __init__(self, dim: int, *, axis: str | None = "embed", rngs: nnx.Rngs):
        super().__init__(dim, silu=False, axis=axis, rngs=rngs)

    def __call__(self, x_BTE: Array, last_BWE: Array | None = None, segments: Array | None = None) -> Array:
        """Map [B, T, E] to [B, T, E].

        `last_BWE` (default zero) holds the W - 1 inputs before the first; `segments` as in `ShortConv`.
        """
        return x_BTE + super().__call__(x_BTE, last_BWE, segments)


class TokenShift(ShortConv):
    """RWKV's token shift: y_t = x_t + mu (x_{t-1} - x_t), learned mu per channel."""

    def __init__(self, dim: int, *, init: Init, rngs: nnx.Rngs):
        super().__init__(dim, width=None, silu=False, rngs=rngs)
        self.past, self.mu = 1, param(rngs, init, (dim,), ("embed",))

    @property
    def taps(self) -> Array:
        """The taps of each channel, float32 [E, 2]."""
        return jnp.stack([self.mu[...], 1 - self.mu[...]], axis=1)


def extend(
    conv: ShortConv | None, x: Array, last_BWE: Array | None, segments: Array | None = None
) -> tuple[Array, Any]:
    """Apply `conv.extend` to [B, T, E], or to a single token [B, E].

    Without a convolution, return the inputs.
    """
    if conv is None:
        return x, None
    if x.ndim == 3:
        return conv.extend(x, last_BWE, segments)
    y_BTE, last_BWE = conv.extend(x[:, None], last_BWE)
    return y_BTE[:, 0], last_BWE


def init_cache(conv: ShortConv | None, batch: int, dtype: Any) -> Array | None:
    """Return `conv.init_cache`, or None without a convolution."""
    return None if conv is None else conv.init_cache(batch, dtype)
