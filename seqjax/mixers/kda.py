"""KDA, Kimi Delta Attention: the delta rule with a decay per key channel.

    g = -exp(A_log) softplus((x F_1) F_2 + dt_bias)  per key channel, A_log per head
    S <- diag(e^{g_t}) S_{t-1};  S_t = S + k_t (x) beta_t (v_t - k_t^T S)
    y_t = RMSNorm(q_t^T S_t) * sigmoid((x G_1) G_2 + b)

Kimi Linear, arXiv 2510.26692; public implementation: flash-linear-attention, `fla/layers/kda.py`. The rank of F_1 and
G_1 is the value width of one head. At 768 x 12: 6 heads of 128, SwiGLU of 2048, RMSNorm with eps 1e-6; 114.4M
parameters, tied. q, k, v and beta are DeltaNet's (`_delta.py`); the recurrence is RWKV-7's (`ops/wkv7.py`) with a =
-e^g k, b = beta k and keys beta k.

`lower_bound` selects the public code's bounded decay, g = lower_bound sigmoid(exp(A_log) ((x F_1) F_2 + dt_bias)). Kimi
Linear follows every three KDA layers with a full-attention layer; here all layers are KDA, and a config can build the
hybrid (configs/kimi_linear.py).

`gate_rank` is the rank of G_1. With `gate_rank="full"`, the gate is sigmoid(x W_g) without bias, as in the ports of
Kimi K3 in vLLM and torchtitan.

`channel_gates` selects Gated DeltaNet-2 (arXiv 2605.22791; `fla/layers/gdn2.py`). It replaces beta by two gates per
channel: b over key channels for erasing, w over value channels for writing.

    S_t = S + k_t (x) (w_t * v_t - (b_t * k_t)^T S),   b = sigmoid(x W_b), w = sigmoid(x W_w)

With b = w = beta it equals KDA. At 768 x 12 with 12 heads of 64 and a SwiGLU of 1536: 112.0M parameters, tied.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers._delta import LowRankDeltaMixer
from seqjax.nn.initializers import constant, dt_bias, log_uniform
from seqjax.nn.layers import Linear, project_float32, save_inputs
from seqjax.nn.params import param
from seqjax.types import Array


class KDA(LowRankDeltaMixer):
    """The delta rule with a decay per key channel and an output gate."""

    resets = True
    gate_activation = "sigmoid"

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,  # summed over heads; None = model width
        value_dim: int | None = None,  # summed over heads; None = model width
        lower_bound: float | None = None,  # of a token's log decay, below 0 (published: -5); None = unbounded
        channel_gates: bool = False,  # Gated DeltaNet-2: erase and write gates per channel instead of beta per head
        gate: bool = True,  # output gate
        # of the output gate; None = the value width of a head, "full" = one matrix without bias
        gate_rank: int | Literal["full"] | None = None,
        conv_width: int = 4,
        conv: bool = True,  # False removes the convolutions; SiLU and the norm of q and k remain
        norm_eps: float = 1e-6,
        chunk_size: int = 64,  # tokens per chunk; affects the speed, not the result
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        key_dim, value_dim = dim if key_dim is None else key_dim, dim if value_dim is None else value_dim
        super().__init__(
            dim,
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_width=conv_width,
            conv=conv,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
            implementation=implementation,
            rngs=rngs,
        )
        if lower_bound is not None and lower_bound >= 0:
            raise UserError(f"lower_bound={lower_bound} must be below 0; -5 is the published one.")
        if isinstance(gate_rank, int) and not 1 <= gate_rank <= value_dim:
            raise UserError(f"gate_rank={gate_rank} must be 1 to {value_dim}, or 'full'.")
        self.lower_bound = lower_bound
        if channel_gates:
            self.beta = Linear(dim, key_dim, axes=("embed", "heads"), rngs=rngs)
        self.write = Linear(dim, value_dim, axes=("embed", "heads"), rngs=rngs) if channel_gates else None
        rank = value_dim // heads
        self.decay_in = Linear(dim, rank, axes=("embed", "rank"), rngs=rngs)
        self.decay_out = Linear(rank, key_dim, axes=("rank", "heads"), rngs=rngs)
        self.gate = Linear(dim, value_dim, axes=("embed", "heads"), rngs=rngs) if gate and gate_rank == "full" else None
        if not gate or gate_rank == "full":
            self.gate_in = self.gate_out = None
        else:
            rank = rank if gate_rank is None else gate_rank
            self.gate_in = Linear(dim, rank, axes=("embed", "rank"), rngs=rngs)
            self.gate_out = Linear(rank, value_dim, axes=("rank", "heads"), bias=True, rngs=rngs)
        log_rate = log_uniform(1.0, 16.0) if lower_bound is None else constant(0.0)
        self.log_rate_H = param(rngs, log_rate, (heads,), ("heads",))
        self.step_bias_E = param(rngs, dt_bias, (key_dim,), ("heads",))

    def _log_decay(self, x_BTD: Array) -> Array:
        """Return the log decay, float32 [B, T, H, K]."""
        step_BTE = project_float32(self.decay_out, self.decay_in(x_BTD)) + self.step_bias_E[...]
        step_BTHK = step_BTE.reshape(*step_BTE.shape[:-1], self.heads, -1)
        rate_H1 = jnp.exp(self.log_rate_H[...])[:, None]
        if self.lower_bound is None:
            return -rate_H1 * jax.nn.softplus(step_BTHK)
        return self.lower_bound * jax.nn.sigmoid(rate_H1 * step_BTHK)

    def _gate(self, x_BTD: Array) -> Array | None:
        if self.gate_in is None or self.gate_out is None:
            return None if self.gate is None else self.gate(x_BTD)
        return self.gate_out(self.gate_in(x_BTD))

    def _inputs(self, x_BTD: Array, q_BTE: Array, k_BTE: Array, v_BTE: Array) -> tuple[Array, ...]:
        """Return the operands of the recurrence: r, k, v, log_w and a."""
        return save_inputs(self._operands)(x_BTD, q_BTE, k_BTE, v_BTE)

    def _operands(self, x_BTD: Array, *convolved: Array) -> tuple[Array, ...]:
        made: Any = super()._inputs(x_BTD, *convolved)
        q_BTHK, k_BTHK, v_BTHV, beta_BTx, log_w_BTHK = made
        a_BTHK = -jnp.exp(log_w_BTHK) * k_BTHK
        if self.write is None:
            k_BTHK = beta_BTx[..., None] * k_BTHK
        else:
            a_BTHK = beta_BTx.reshape(a_BTHK.shape) * a_BTHK
            v_BTHV = jax.nn.sigmoid(project_float32(self.write, x_BTD)).reshape(v_BTHV.shape) * v_BTHV
        dtype = q_BTHK.dtype
        return q_BTHK, k_BTHK.astype(dtype), v_BTHV.astype(dtype), log_w_BTHK, a_BTHK.astype(dtype)
