"""Mamba-2: a state space with one data-dependent decay per head.

    [z, xBC, dt] = u W_in;  [x, B, C] = silu(conv4(xBC) + b)
    D_t = softplus(dt + dt_bias),  a_t = exp(-exp(A_log) D_t)                     per head
    S_t = a_t S_{t-1} + B_t (D_t x_t)^T,   y_t = C_t S_t + D x_t                  S [N, V] per head
    out = RMSNorm(y * silu(z)) W_out                                              one group, the gate before the norm

Dao and Gu, arXiv 2405.21060; public implementation: state-spaces/mamba. The heads share B and C. Step sizes, decays and
the state are float32. W_in is stored as four matrices (z, x, BC, dt) and the convolution as two, which lets each be
sharded over devices. The block has no MLP and keeps a float32 residual stream.

Ablations (arXiv 2505.18522, section 3): `decay` "one" or "none" (see mixers/_ssm.py), `conv=False` (the SiLU remains),
`norm=False`. `gate=False` removes z.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.mixers import base
from seqjax.mixers._ssm import SharedDecay, n_heads, out_init
from seqjax.nn.initializers import constant, dt_bias, log_uniform, uniform
from seqjax.nn.layers import Linear, RMSNorm, project_float32, save_inputs, silu
from seqjax.nn.params import param
from seqjax.nn.short_conv import ShortConv
from seqjax.ops.head_norm import head_norm
from seqjax.ops.ssd import CHUNK, ssd
from seqjax.types import Array, Layer


class Mamba2Cache(NamedTuple):
    """The last inputs of the convolutions, and the float32 state."""

    x_BWE: Array
    bc_BWN: Array
    state_BHNV: Array


class Mamba2(base.RecurrentMixer):
    """The state space model with its projections, convolutions, gate and norm."""

    resets = True

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,  # inner width / model width
        head_dim: int = 64,
        state: int = 128,
        conv_width: int = 4,
        conv: bool = True,  # False removes the convolutions and keeps the SiLU
        decay: Literal["full", "one", "none"] = "full",
        norm: bool = True,
        gate: bool = True,  # output gate
        chunk_size: int = CHUNK,  # tokens per chunk; affects the speed, not the result
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        base.at_least(1, expand=expand, head_dim=head_dim, state=state, conv_width=conv_width, chunk_size=chunk_size)
        self.width, self.heads = expand * dim, n_heads(dim, expand=expand, head_dim=head_dim)
        self.head_dim, self.n_state = head_dim, state
        self.past, self.chunk_size = (conv_width - 1 if conv else 0), chunk_size
        init = uniform(dim**-0.5)
        self.z = Linear(dim, self.width, axes=("embed", "heads"), init=init, rngs=rngs) if gate else None
        self.x = Linear(dim, self.width, axes=("embed", "heads"), init=init, rngs=rngs)
        self.bc = Linear(dim, 2 * state, axes=("embed", None), init=init, rngs=rngs)
        self.dt = Linear(dim, self.heads, axes=("embed", "heads"), init=init, rngs=rngs)
        self.conv_x = ShortConv(self.width, width=conv_width, bias=True, axis="heads", rngs=rngs) if conv else None
        self.conv_bc = ShortConv(2 * state, width=conv_width, bias=True, axis=None, rngs=rngs) if conv else None
        self.dt_bias = param(rngs, dt_bias, (self.heads,), ("heads",))
        self.a_log = param(rngs, log_uniform(1.0, 16.0), (self.heads,), ("heads",)) if decay == "full" else None
        self.decay = SharedDecay(dim, axis="embed", rngs=rngs) if decay == "one" else None
        self.skip = param(rngs, constant(1.0), (self.heads,), ("heads",))
        self.norm = RMSNorm(self.width, axis="heads", rngs=rngs) if norm else None
        out = out_init(self.width, layer.n_layers)
        self.out = Linear(self.width, dim, axes=("heads", "embed"), init=out, rngs=rngs)

    def log_decay(self, u_BTD: Array, dt_BTH: Array) -> Array:
        """Return each head's log decay, float32 [B, T, H]."""
        if self.a_log is not None:
            return -jnp.exp(self.a_log[...]) * dt_BTH
        if self.decay is not None:
            return jnp.broadcast_to(self.decay(u_BTD)[..., None], dt_BTH.shape)
        return jnp.zeros_like(dt_BTH)

    def prefill(self, u_BTD: Array, cache: Mamba2Cache, segments: Array | None = None) -> tuple[Array, Mamba2Cache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        (x_BTHV, dt_BTH, b_BTN, c_BTN), past = self.inputs(u_BTD, cache.x_BWE, cache.bc_BWN, segments)
        y_BTHV, state_BHNV = ssd(
            x_BTHV,
            self.log_decay(u_BTD, dt_BTH),
            b_BTN,
            c_BTN,
            dt_BTH=dt_BTH,
            initial_state=cache.state_BHNV,
            return_state=True,
            segments=segments,
            chunk_size=self.chunk_size,
        )
        return self.outputs(u_BTD, y_BTHV, x_BTHV), Mamba2Cache(*past, state_BHNV)

    def inputs(
        self, u_BTD: Array, past_x_BWE: Array, past_bc_BWN: Array, segments: Array | None = None
    ) -> tuple[tuple[Array, Array, Array, Array], tuple[Array, Array]]:
        """Return the operands of the recurrence and the convolutions' last inputs.

        The operands are x [B, T, H, V], step sizes [B, T, H], and B and C [B, T, N].
        """
        x_BTE, bc_BTN = self.x(u_BTD), self.bc(u_BTD)
        if self.conv_x is not None and self.conv_bc is not None:
            x_BTE, past_x_BWE = self.conv_x.extend(x_BTE, past_x_BWE, segments)
            bc_BTN, past_bc_BWN = self.conv_bc.extend(bc_BTN, past_bc_BWN, segments)
        else:
            x_BTE, bc_BTN = jax.nn.silu(x_BTE), jax.nn.silu(bc_BTN)
        b_BTN, c_BTN = jnp.split(bc_BTN, 2, axis=-1)
        dt_BTH = jax.nn.softplus(project_float32(self.dt, u_BTD) + self.dt_bias[...])
        x_BTHV = x_BTE.reshape(*u_BTD.shape[:2], self.heads, self.head_dim)
        return (x_BTHV, dt_BTH, b_BTN, c_BTN), (past_x_BWE, past_bc_BWN)

    def outputs(self, u_BTD: Array, y_BTHV: Array, x_BTHV: Array) -> Array:
        """Apply the skip connection, output gate, norm and output projection."""
        z_BTE = None if self.z is None else self.z(u_BTD)
        if self.norm is None:
            y_BTE = save_inputs(self._gated)(y_BTHV, x_BTHV, z_BTE)
        else:
            skip, gain = (x_BTHV, self.skip[...][None, None]), self.norm.g[...]
            y_BTE = head_norm(y_BTHV, z_BTE, skip, gain=gain, gate_first=True, eps=self.norm.eps)
        return self.out(y_BTE)

    def _gated(self, y_BTHV: Array, x_BTHV: Array, z_BTE: Array | None) -> Array:
        """Return (y + D x) * silu(z), without the norm."""
        y_BTHV += x_BTHV * self.skip[...][:, None].astype(x_BTHV.dtype)
        y_BTE = y_BTHV.reshape(*y_BTHV.shape[:2], -1)
        return y_BTE if z_BTE is None else (y_BTE * silu(z_BTE)).astype(y_BTE.dtype)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Mamba2Cache:
        """Return an empty cache."""
        del max_len
        return Mamba2Cache(
            jnp.zeros((batch, self.past, self.width), dtype),
            jnp.zeros((batch, self.past, 2 * self.n_state), dtype),
            jnp.zeros((batch, self.heads, self.n_state, self.head_dim), jnp.float32),
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token of the chunked recurrence.

        Counts the scores and their product with x over half a chunk, the state update and the state read.
        """
        chunk, n_state = min(self.chunk_size, seq_len), self.n_state
        return (n_state + self.width) * (chunk + 1) + 4 * self.width * n_state
