"""KDA, Kimi Delta Attention: the delta rule with a decay per key channel.

    g = -exp(A_log) softplus((x F_1) F_2 + dt_bias)  per key channel, A_log per head
    S <- diag(e^{g_t}) S_{t-1};  S_t = S + k_t (x) beta_t (v_t - k_t^T S)
    y_t = RMSNorm(q_t^T S_t) * sigmoid((x G_1) G_2 + b)

Kimi Linear, arXiv 2510.26692; public implementation: flash-linear-attention, `fla/layers/kda.py`. The rank of F_1 and
G_1 is the value width of one head. At 768 x 12: 6 heads of 128, SwiGLU of 2048, RMSNorm with eps 1e-6; 114.4M
parameters, tied. q, k, v and beta are DeltaNet's (`_delta.py`). The op makes decays and gates from their
pre-activations (`ops/kda.py`).

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
from seqjax.mixers._delta import DeltaMixer
from seqjax.nn.initializers import constant, dt_bias, log_uniform
from seqjax.nn.layers import Linear, project_float32, save_inputs
from seqjax.nn.params import param
from seqjax.ops.kda import kda, kda_step
from seqjax.types import Array


class KDA(DeltaMixer):
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

    def _gate(self, x_BTD: Array) -> Array | None:
        if self.gate_in is None or self.gate_out is None:
            return None if self.gate is None else self.gate(x_BTD)
        return self.gate_out(self.gate_in(x_BTD))

    def _inputs(self, x_BTD: Array, *convolved: Array) -> tuple[Array, ...]:
        """Return the operands of the recurrence: q, k, v and the pre-activations of decay and gates.

        The float32 product of beta per head is small; the other pre-activations have the dtype of x.
        """
        q_BTHK, k_BTHK, v_BTHV = (x.reshape(*x.shape[:2], self.heads, -1) for x in convolved)
        decay_BTHK = self.decay_out(self.decay_in(x_BTD)).reshape(k_BTHK.shape)
        if self.write is None:
            return q_BTHK, k_BTHK, v_BTHV, decay_BTHK, project_float32(self.beta, x_BTD)
        v_BTHV = save_inputs(self._written)(x_BTD, v_BTHV)
        return q_BTHK, k_BTHK, v_BTHV, decay_BTHK, self.beta(x_BTD).reshape(k_BTHK.shape)

    def _written(self, x_BTD: Array, v_BTHV: Array) -> Array:
        assert self.write is not None
        gate_BTE = jax.nn.sigmoid(project_float32(self.write, x_BTD))
        return (gate_BTE.reshape(v_BTHV.shape) * v_BTHV).astype(v_BTHV.dtype)

    @property
    def _decay(self) -> dict[str, Any]:
        bias_HK = self.step_bias_E[...].reshape(self.heads, -1)
        return {"rate_H": jnp.exp(self.log_rate_H[...]), "bias_HK": bias_HK, "lower_bound": self.lower_bound}

    def _recurrence(self, operands: Any, s_BHKV: Array | None, **segments: Array) -> tuple[Array, Array]:
        options: Any = {"chunk_size": self.chunk_size, "implementation": self.implementation}
        return kda(*operands, initial_state=s_BHKV, **self._decay, **segments, **options)

    def _recurrent_step(self, operands: Any, s_BHKV: Array) -> tuple[Array, Array]:
        return kda_step(*operands, s_BHKV=s_BHKV, **self._decay)
