"""Mamba-3, SISO: trapezoidal inputs; B and C are normed, biased and rotated.

    [z, x, B, C, dt, a, l, theta] = u W_in;  D_t = softplus(dt + dt_bias),  A_t = -max(act(a), 1e-4)         per head
    phi_t = sum_{s<=t} pi tanh(theta_s) D_s                        mod 2 pi, per head and pair of channels
    k_t = rotate(RMSNorm(B_t) + b_B, phi_t),  q_t = rotate(RMSNorm(C_t) + b_C, phi_t)     biases [H, N]
    alpha_t = exp(A_t D_t),  beta_t = (1 - sigmoid(l_t)) D_t alpha_t,  gamma_t = sigmoid(l_t) D_t
    S_t = alpha_t S_{t-1} + beta_t k_{t-1} x_{t-1}^T + gamma_t k_t x_t^T                  S [N, V] per head
    y_t = q_t S_t + D x_t,   out = (y * silu(z)) W_out

arXiv 2603.15569; public implementation: state-spaces/mamba, `mamba_ssm/modules/mamba3.py`. There is no convolution. The
heads share RMSNorm(B), RMSNorm(C) and theta. Biases and step sizes differ by head, hence k and q do too. The rotation
acts on the channel pairs (2m, 2m + 1), m < N / 4. act(a) is 1 + a above 0 and 1 / (1 - a) below; `rate="softplus"` is
the first release's activation. `norm` is the public code's optional RMSNorm per head before the gate. W_in is stored as
seven matrices, which can be sharded over devices.

With U_t, the state before token t's own input, S_t = U_t + gamma_t k_t x_t^T and

    U_t = alpha_t U_{t-1} + (alpha_t gamma_{t-1} + beta_t) k_{t-1} x_{t-1}^T
    y_t = q_t U_t + (gamma_t q_t . k_t + D) x_t

This is one pass of Mamba-2's recurrence (`ops/ssd.py`) over the previous token's inputs; in q_t . k_t the rotation
cancels. The usual alternative, input weights gamma_t + beta_{t+1} / alpha_{t+1}, adds the next token to an output and
subtracts it again, which leaves a rounding error that depends on the future. The cache holds U and the parts of this
token that the next token needs. Step sizes, decays, angles (in turns) and the state are float32.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import kernels_pallas
from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._ssm import n_heads, out_init
from seqjax.nn.initializers import constant, dt_bias, uniform
from seqjax.nn.layers import STATISTICS, Linear, RMSNorm, project_float32, save_inputs
from seqjax.nn.params import param
from seqjax.ops.ssd import ssd_of_heads
from seqjax.sharding import gather_time, heads_to_time, time_to_heads
from seqjax.types import Array, Layer

LEAST_RATE = 1e-4


class Mamba3Cache(NamedTuple):
    """The float32 state before the last token's input, and the last token's values.

    These are x, normed B, and float32 angles (in turns) and weight gamma.
    """

    x_BE: Array
    b_BN: Array
    turns_BHR: Array
    gamma_BH: Array
    state_BHNV: Array


class Mamba3(base.RecurrentMixer):
    """The state space model with its projections, norms, rotations and gate."""

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,  # inner width / model width
        head_dim: int = 64,
        state: int = 128,
        angles: int | None = None,  # rotated channel pairs; None = a quarter of the state
        rate: Literal["heavy_tail", "softplus"] = "heavy_tail",  # activation of -A
        norm: bool = False,
        chunk_size: int = 64,  # tokens per chunk; affects the speed, not the result
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        angles = max(1, state // 4) if angles is None else angles
        base.at_least(1, expand=expand, head_dim=head_dim, state=state, angles=angles, chunk_size=chunk_size)
        if 2 * angles > state:
            raise UserError(f"angles={angles} must be at most {state // 2}, half of state={state}.")
        self.width, self.heads = expand * dim, n_heads(dim, expand=expand, head_dim=head_dim)
        self.head_dim, self.n_state, self.angles = head_dim, state, angles
        self.activation, self.chunk_size = rate, chunk_size
        init = uniform(dim**-0.5)
        self.z = Linear(dim, self.width, axes=("embed", "heads"), init=init, rngs=rngs)
        self.x = Linear(dim, self.width, axes=("embed", "heads"), init=init, rngs=rngs)
        self.bc = Linear(dim, 2 * state, axes=("embed", None), init=init, rngs=rngs)
        self.dt = Linear(dim, self.heads, axes=("embed", "heads"), init=init, rngs=rngs)
        self.rate = Linear(dim, self.heads, axes=("embed", "heads"), init=init, rngs=rngs)
        self.trap = Linear(dim, self.heads, axes=("embed", "heads"), init=init, rngs=rngs)
        self.angle = Linear(dim, angles, axes=("embed", None), init=init, rngs=rngs)
        self.dt_bias = param(rngs, dt_bias, (self.heads,), ("heads",))
        self.b_norm = RMSNorm(state, axis=None, rngs=rngs)
        self.c_norm = RMSNorm(state, axis=None, rngs=rngs)
        self.b_bias = param(rngs, constant(1.0), (self.heads, state), ("heads", None), group="vector")
        self.c_bias = param(rngs, constant(1.0), (self.heads, state), ("heads", None), group="vector")
        self.skip = param(rngs, constant(1.0), (self.heads,), ("heads",))
        self.norm = RMSNorm(head_dim, axis="heads", heads=self.heads, rngs=rngs) if norm else None
        # The block's MLP also writes to the residual stream, hence two branches per layer.
        self.out = Linear(
            self.width, dim, axes=("heads", "embed"), init=out_init(self.width, 2 * layer.n_layers), rngs=rngs
        )

    def prefill(self, u_BTD: Array, cache: Mamba3Cache) -> tuple[Array, Mamba3Cache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        x_BTHV = self.x(u_BTD).reshape(*u_BTD.shape[:2], self.heads, self.head_dim)
        steps = [project_float32(linear, u_BTD) for linear in (self.dt, self.rate, self.trap, self.angle)]
        operands, skip_BTH, last = save_inputs(self._operands)(x_BTHV, self.bc(u_BTD), *steps, cache)
        past_BTHV, log_a_BTH, k_BTHN, q_BTHN, weight_BTH = operands
        y_BTHV, state_BHNV = ssd_of_heads(
            past_BTHV,
            log_a_BTH,
            k_BTHN,
            q_BTHN,
            dt_BTH=weight_BTH,
            initial_state=cache.state_BHNV,
            chunk_size=self.chunk_size,
        )
        y_BTE = save_inputs(self._gated)(heads_to_time(y_BTHV), x_BTHV, skip_BTH, self.z(u_BTD))
        return self.out(y_BTE), last._replace(state_BHNV=state_BHNV)

    def _operands(
        self,
        x_BTHV: Array,
        bc_BTN: Array,
        dt_BTH: Array,
        rate_BTH: Array,
        trap_BTH: Array,
        angle_BTR: Array,
        cache: Mamba3Cache,
    ) -> tuple[tuple[Array, ...], Array, Mamba3Cache]:
        """Return the operands of the recurrence, the skip weights, and the next cache.

        The skip weights multiply each token's own x. The next cache lacks the new state. If devices split the sequence,
        the operands have all of the time and a share of the heads, because angles are sums over the past. B, C and
        theta are gathered over time because they are smaller than k and q: the heads share them.
        """
        dt_BTH = jax.nn.softplus(dt_BTH + self.dt_bias[...])
        act = jax.nn.softplus if self.activation == "softplus" else _heavy_tail
        log_a_BTH, own_BTH = -jnp.maximum(act(rate_BTH), LEAST_RATE) * dt_BTH, jax.nn.sigmoid(trap_BTH)
        b_BTN, c_BTN = jnp.split(bc_BTN, 2, axis=-1)
        b_BTN, c_BTN = gather_time(self.b_norm(b_BTN)), gather_time(self.c_norm(c_BTN))
        turn_BTR = gather_time(jnp.tanh(angle_BTR) / 2)
        x_BTHV, log_a_BTH, dt_BTH, own_BTH = (time_to_heads(x) for x in (x_BTHV, log_a_BTH, dt_BTH, own_BTH))
        gamma_BTH = own_BTH * dt_BTH
        made = kernels_pallas.mamba3_operands(
            b_BTN,
            c_BTN,
            turn_BTR,
            dt_BTH,
            b_bias_HN=self.b_bias[...],
            c_bias_HN=self.c_bias[...],
            before_BN=cache.b_BN,
            start_BHR=cache.turns_BHR,
        )
        # Saved, so that the backward pass does not make k and q again for these products.
        skip_BTH = gamma_BTH * checkpoint_name(made.own_BTH, STATISTICS) + self.skip[...]
        past_BTHV = _after(cache.x_BE.reshape(-1, *x_BTHV.shape[2:]), x_BTHV)[:, :-1]
        before_BTH = _after(cache.gamma_BH, gamma_BTH)[:, :-1]
        weight_BTH = jnp.exp(log_a_BTH) * (before_BTH + (1 - own_BTH) * dt_BTH)
        last = cache._replace(
            x_BE=x_BTHV[:, -1].reshape(cache.x_BE.shape).astype(cache.x_BE.dtype),
            b_BN=b_BTN[:, -1].astype(cache.b_BN.dtype),
            turns_BHR=made.turns_BHR,
            gamma_BH=gamma_BTH[:, -1],
        )
        return (past_BTHV, log_a_BTH, made.k_BTHN, made.q_BTHN, weight_BTH), heads_to_time(skip_BTH), last

    def _gated(self, y_BTHV: Array, x_BTHV: Array, skip_BTH: Array, z_BTE: Array) -> Array:
        """Return (y + skip x) * silu(z); with `norm`, the sum is normed per head."""
        y_BTHV = y_BTHV.astype(jnp.float32) + skip_BTH[..., None] * x_BTHV.astype(jnp.float32)
        y_BTHV = y_BTHV if self.norm is None else self.norm(y_BTHV)
        return (y_BTHV.reshape(z_BTE.shape) * jax.nn.silu(z_BTE.astype(jnp.float32))).astype(z_BTE.dtype)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Mamba3Cache:
        """Return an empty cache; it does not depend on `max_len`."""
        del max_len
        return Mamba3Cache(
            jnp.zeros((batch, self.width), dtype),
            jnp.zeros((batch, self.n_state), dtype),
            jnp.zeros((batch, self.heads, self.angles), jnp.float32),
            jnp.zeros((batch, self.heads), jnp.float32),
            jnp.zeros((batch, self.heads, self.n_state, self.head_dim), jnp.float32),
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token of the chunked recurrence.

        Counts the scores and their product with x over half a chunk, the state update, the state read, and q . k. Every
        head has separate scores.
        """
        chunk, keys = min(self.chunk_size, seq_len), self.heads * self.n_state
        return (keys + self.width) * (chunk + 1) + 4 * self.width * self.n_state + 2 * keys


def _heavy_tail(a: Array) -> Array:
    """Return 1 + a for a >= 0 and 1 / (1 - a) below.

    The result is positive and has slope 1 at 0.
    """
    return jnp.where(a >= 0, 1 + a, 1 / (1 - jnp.minimum(a, 0)))


def _after(first: Array, x: Array) -> Array:
    """Return x [B, T, ...] preceded by the previous token's `first` [B, ...].

    The result is [B, 1 + T, ...].
    """
    return jnp.concatenate([first.astype(x.dtype)[:, None], x], axis=1)
