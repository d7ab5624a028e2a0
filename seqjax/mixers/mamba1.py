"""Mamba-1: a selective state space with a decay per channel and state.

    [x, z] = u W_in;  x = silu(conv4(x) + b);  [delta, B, C] = x W_x;  dt = softplus(delta W_dt + b_dt)
    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,   A = -exp(A_log),   y_t = h_t C_t + D x_t         h [E, N]
    out = (y * silu(z)) W_out

Gu and Dao, arXiv 2312.00752; public implementation: state-spaces/mamba. Step sizes, decays and the state are float32.
W_in and W_x are stored as two matrices each, which lets each matrix be sharded over devices. The block has no MLP and
keeps a float32 residual stream.

Ablations (arXiv 2505.18522, section 3): `decay` can be "one" or "none" (mixers/_ssm.py; the transition is then a
scalar, and the scan is Mamba-2's) or "one_dt" (the step size is also one scalar per token). `conv=False` removes the
convolution and keeps the SiLU.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.mixers import base
from seqjax.mixers._ssm import SharedDecay, out_init
from seqjax.nn.initializers import constant, dt_bias, uniform
from seqjax.nn.layers import Linear, save_inputs, silu
from seqjax.nn.params import param
from seqjax.nn.short_conv import ShortConv
from seqjax.ops.selective_scan import selective_scan
from seqjax.ops.ssd import CHUNK as SSD_CHUNK
from seqjax.ops.ssd import ssd
from seqjax.types import Array, Layer


class Mamba1Cache(NamedTuple):
    """The last inputs of the convolution, and the float32 state."""

    x_BWE: Array
    state_BEN: Array


class Mamba1(base.RecurrentMixer):
    """The selective state space model with its projections, convolution and gate."""

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,  # inner width / model width
        state: int = 16,
        dt_rank: int | None = None,  # None = model width / 16, rounded up
        conv_width: int = 4,
        conv: bool = True,  # False removes the convolution and keeps the SiLU
        decay: Literal["full", "one", "one_dt", "none"] = "full",
        chunk_size: int | None = None,  # tokens per chunk; affects only the speed; None = the scan's default
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        base.at_least(1, expand=expand, state=state, dt_rank=dt_rank, conv_width=conv_width, chunk_size=chunk_size)
        self.width = width = expand * dim
        self.n_state, self.past, self.chunk_size = state, (conv_width - 1 if conv else 0), chunk_size
        rank, own_dt = dt_rank or -(-dim // 16), decay != "one_dt"
        inner, axes = uniform(width**-0.5), ("mlp", None)
        self.x = Linear(dim, width, axes=("embed", "mlp"), init=uniform(dim**-0.5), rngs=rngs)
        self.z = Linear(dim, width, axes=("embed", "mlp"), init=uniform(dim**-0.5), rngs=rngs)
        self.conv = ShortConv(width, width=conv_width, bias=True, rngs=rngs) if conv else None
        self.delta = Linear(width, rank, axes=axes, init=inner, rngs=rngs) if own_dt else None
        self.bc = Linear(width, 2 * state, axes=axes, init=inner, rngs=rngs)
        self.dt = Linear(rank, width, axes=(None, "mlp"), init=uniform(rank**-0.5), rngs=rngs) if own_dt else None
        self.dt_bias = param(rngs, dt_bias, (width,), ("mlp",)) if own_dt else None
        self.a_log = param(rngs, _a_log, (width, state), ("mlp", "state")) if decay == "full" else None
        self.decay = SharedDecay(width, axis="mlp", rngs=rngs) if decay in ("one", "one_dt") else None
        self.skip = param(rngs, constant(1.0), (width,), ("mlp",))
        self.out = Linear(width, dim, axes=("mlp", "embed"), init=out_init(width, layer.n_layers), rngs=rngs)

    def _step_size(self, x_BTE: Array) -> Array:
        if self.delta is None or self.dt is None or self.dt_bias is None:
            assert self.decay is not None
            return jnp.broadcast_to(self.decay.step_size(x_BTE)[..., None], x_BTE.shape)
        dt, bias_E = self.dt, self.dt_bias[...]
        step_size = save_inputs(lambda delta_BTR: jax.nn.softplus(dt(delta_BTR).astype(jnp.float32) + bias_E))
        return step_size(self.delta(x_BTE))

    def _scan(self, x_BTE: Array, state_BEN: Array) -> tuple[Array, Array]:
        b_BTN, c_BTN = jnp.split(self.bc(x_BTE), 2, axis=-1)
        chunk = self.chunk_size
        if self.a_log is not None:
            assert self.delta is not None
            assert self.dt is not None
            assert self.dt_bias is not None
            a_EN, dt_BTE = -jnp.exp(self.a_log[...]), self.dt(self.delta(x_BTE))  # the scan adds the bias, in float32
            options: Any = {"initial_state": state_BEN, "return_state": True, "chunk_size": chunk}
            options["dt_bias_E"] = self.dt_bias[...]
            out: Any = selective_scan(x_BTE, dt_BTE, a_EN, b_BTN, c_BTN, self.skip[...], **options)
            return out
        # All channels share one transition, so this is Mamba-2's scan with one head as wide as the model.
        log_a_BT = jnp.zeros(x_BTE.shape[:2]) if self.decay is None else self.decay(x_BTE)
        x32_BTE, dt_BTE = x_BTE.astype(jnp.float32), self._step_size(x_BTE)
        y_BTHV, state_BHNV = ssd(
            (x32_BTE * dt_BTE).astype(x_BTE.dtype)[:, :, None],
            log_a_BT[..., None],
            b_BTN,
            c_BTN,
            initial_state=jnp.moveaxis(state_BEN, 1, 2)[:, None],
            return_state=True,
            chunk_size=chunk,
        )
        y_BTE = y_BTHV[:, :, 0] + (self.skip[...] * x32_BTE).astype(x_BTE.dtype)
        return y_BTE, jnp.moveaxis(state_BHNV[:, 0], 1, 2)

    def prefill(self, u_BTD: Array, cache: Mamba1Cache) -> tuple[Array, Mamba1Cache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        x_BTE, past_BWE = self.x(u_BTD), cache.x_BWE
        if self.conv is None:
            x_BTE = jax.nn.silu(x_BTE)
        else:
            x_BTE, past_BWE = self.conv.extend(x_BTE, past_BWE)
        y_BTE, state_BEN = self._scan(x_BTE, cache.state_BEN)
        y_BTE = save_inputs(lambda y, z: (y * silu(z)).astype(y.dtype))(y_BTE, self.z(u_BTD))
        return self.out(y_BTE), Mamba1Cache(past_BWE, state_BEN)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Mamba1Cache:
        """Return an empty cache."""
        del max_len
        state_BEN = jnp.zeros((batch, self.width, self.n_state), jnp.float32)
        return Mamba1Cache(jnp.zeros((batch, self.past, self.width), dtype), state_BEN)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token of the recurrence.

        The full decay takes 9 elementwise FLOPs per channel and state. The other decays count Mamba-2's chunked form.
        """
        if self.a_log is not None:
            return 9 * self.width * self.n_state
        chunk = min(self.chunk_size or SSD_CHUNK, seq_len)
        return (self.n_state + self.width) * (chunk + 1) + 4 * self.width * self.n_state


def _a_log(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    del key
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[1] + 1, dtype=dtype)), shape)
