"""The short depthwise convolution over time that precedes the recurrences of Mamba, DeltaNet and Based.

It is causal and computed in float32. In decoding, its last inputs are carried from one call to the next.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.nn.initializers import Init, uniform
from seqjax.nn.params import param
from seqjax.sharding import rows_to_time, time_pieces, time_to_rows
from seqjax.types import Array


class ShortConv(nnx.Module):
    """A depthwise causal convolution, y_t = act(sum_i w_i x_{t - W + 1 + i} + b).

    The last of the W taps multiplies the current token. Taps and bias are drawn from U(+-1 / sqrt(W)), as in torch's
    Conv1d, unless `init` is given. The activation is SiLU, or none with `silu=False`.
    """

    def __init__(
        self,
        dim: int,
        *,
        width: int = 4,
        bias: bool = False,
        silu: bool = True,
        init: Init | None = None,
        axis: str | None = "mlp",
        rngs: nnx.Rngs,
    ):
        init = init or uniform(width**-0.5)
        self.silu = silu
        self.w = param(rngs, init, (dim, width), (axis, "conv"))
        self.b = param(rngs, init, (dim,), (axis,)) if bias else None

    def __call__(self, x_BTE: Array, last_BWE: Array | None = None) -> Array:
        """Map [B, T, E] to [B, T, E]; `last_BWE` (default zero) holds the W - 1 inputs before the first."""
        n_past = self.w.shape[1] - 1
        bias = None if self.b is None else self.b[...]
        n_batch, seq_len, _ = x_BTE.shape
        n_pieces = time_pieces(x_BTE)
        if n_pieces > 1 and n_past <= seq_len // n_pieces:
            last_BWE = self.init_cache(n_batch, x_BTE.dtype) if last_BWE is None else last_BWE
            x_BSE = time_to_rows(x_BTE, last_BWE.astype(x_BTE.dtype))
        elif last_BWE is None:
            x_BSE = jnp.pad(x_BTE, ((0, 0), (n_past, 0), (0, 0)))
        else:
            x_BSE = jnp.concatenate([last_BWE.astype(x_BTE.dtype), x_BTE], axis=1)
        return rows_to_time(_conv_act(x_BSE, self.w[...], bias, self.silu), n_batch)

    def init_cache(self, batch: int, dtype: Any) -> Array:
        """Return zeros [B, W - 1, E] in place of earlier inputs."""
        return jnp.zeros((batch, self.w.shape[1] - 1, self.w.shape[0]), dtype)

    def extend(self, x_BTE: Array, last_BWE: Array) -> tuple[Array, Array]:
        """Return the convolution of inputs that follow `last_BWE`, and the last W - 1 inputs for the next call."""
        seen = jnp.concatenate([last_BWE, x_BTE.astype(last_BWE.dtype)], axis=1)
        return self(x_BTE, last_BWE), seen[:, x_BTE.shape[1] :]


# This has its own gradient because autodiff would keep W shifted float32 copies of the input, or compute them again.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _conv_act(x_BSE: Array, w_EW: Array, b_E: Array | None, silu: bool) -> Array:
    z = _conv(x_BSE, w_EW, b_E)
    return (jax.nn.silu(z) if silu else z).astype(x_BSE.dtype)


def _conv(x_BSE: Array, w_EW: Array, b_E: Array | None) -> Array:
    width = w_EW.shape[1]
    x32, n_out = x_BSE.astype(jnp.float32), x_BSE.shape[1] - width + 1
    z: Any = sum(x32[:, i : i + n_out] * w_EW[:, i] for i in range(width))
    return z if b_E is None else z + b_E


def _conv_act_forward(x_BSE: Array, w_EW: Array, b_E: Array | None, silu: bool):
    return _conv_act(x_BSE, w_EW, b_E, silu), (x_BSE, w_EW, b_E)


def _conv_act_backward(silu: bool, saved: tuple[Array, Array, Array | None], dy: Array):
    x_BSE, w_EW, b_E = saved
    width, n_out = w_EW.shape[1], dy.shape[1]
    dz = dy
    if silu:
        dz = jax.vjp(jax.nn.silu, _conv(x_BSE, w_EW, b_E))[1](dy.astype(jnp.float32))[0].astype(dy.dtype)
        # Computed once: XLA would compute it again for each of the taps below.
        dz = jax.lax.optimization_barrier(dz)
    padded = jnp.pad(dz, ((0, 0), (width - 1, width - 1), (0, 0))).astype(jnp.float32)
    taps = range(width)
    dx: Any = sum(padded[:, width - 1 - i : width - 1 - i + x_BSE.shape[1]] * w_EW[:, i] for i in taps)
    dz32, x32 = dz.astype(jnp.float32), x_BSE.astype(jnp.float32)
    dw = jnp.stack([jnp.sum(dz32 * x32[:, i : i + n_out], axis=(0, 1)) for i in taps], axis=1)
    return dx.astype(x_BSE.dtype), dw, None if b_E is None else jnp.sum(dz32, axis=(0, 1))


_conv_act.defvjp(_conv_act_forward, _conv_act_backward)
