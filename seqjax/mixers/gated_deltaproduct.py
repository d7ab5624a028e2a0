"""Gated DeltaProduct: Gated DeltaNet with n delta-rule steps per token.

    k_j, v_j, beta_j  for j = 1..n, each with a separate projection;  beta = sigmoid(x W_b), or twice that
    S <- e^{g_t} S_{t-1};  S <- S + k_j (x) beta_j (v_j - k_j^T S)  for j = 1..n;  S_t = S
    y_t = RMSNorm(q_t^T S_t) * silu(x W_g)

Siems et al., arXiv 2502.10297; public implementation: flash-linear-attention, `fla/layers/gated_deltaproduct.py`. With
beta in (0, 2), one step can flip the sign of the value that S stores for a key, and two steps can rotate S. This allows
state tracking: one step counts modulo 2, two steps count modulo any number. (In bfloat16 the keys are only nearly unit
vectors, and with beta near 2 S may grow by up to 1% per step.) Decay, gate, norms and initial values are Gated
DeltaNet's; n = 1 with beta in (0, 1) is Gated DeltaNet. See `_delta.py`.

The columns of W_k (W_v, W_b) are ordered by head and then by step; the public code orders them by step first. Devices
that split the heads therefore hold all steps of their heads. At 768 x 12 and n = 2: 4 heads with keys of 96 and values
of 120, SwiGLU of 2048, RMSNorm with eps 1e-6; 109.7M parameters, tied.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from seqjax.mixers._delta import GatedDeltaMixer
from seqjax.types import Array


class GatedDeltaProduct(GatedDeltaMixer):
    """Several steps of the delta rule per token, with decay and output gate."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        steps: int = 2,  # delta-rule steps per token
        decay: bool = True,  # False: DeltaProduct without forgetting, with the output gate
        allow_negative_eigenvalues: bool = True,  # beta in (0, 2); False: in (0, 1)
        key_dim: int | None = None,  # of one step, summed over heads; None = half the model width
        value_dim: int | None = None,  # of one step, summed over heads; None = key_dim
        gate: bool = True,  # output gate
        conv_width: int = 4,
        conv: bool = True,  # False removes the convolutions; SiLU and the norm of q and k remain
        norm_eps: float = 1e-6,
        chunk_size: int = 64,  # steps per chunk; affects the speed, not the result
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        key_dim = dim // 2 if key_dim is None else key_dim
        super().__init__(
            dim,
            heads=heads,
            key_dim=key_dim,
            value_dim=key_dim if value_dim is None else value_dim,
            steps=steps,
            decay=decay,
            gate=gate,
            conv_width=conv_width,
            conv=conv,
            norm_eps=norm_eps,
            chunk_size=chunk_size,
            implementation=implementation,
            rngs=rngs,
        )
        self.beta_scale = 2.0 if allow_negative_eigenvalues else 1.0

    # The delta rule runs over one sequence of S = n T positions, n per token. The state decays at a token's first step
    # and is read at its last step; all other queries are zero, and their outputs are dropped. The recurrence costs n
    # times Gated DeltaNet's: 3 n products with a state per token where 2 n + 1 would suffice, and n times the inputs
    # stored for the gradient, including q. This wastes less than a third of the recurrence, and the recurrence is 3% of
    # a layer's FLOPs at 110m. In return, the kernels of every backend, their gradients and meshes work unchanged.
    def _in_order(self, x_BTE: Array) -> Array:
        """Reorder per-token values [B, T, H n ...] to one position per step.

        Returns [B, n T, H ...].
        """
        n_batch, seq_len, width = x_BTE.shape
        x_BTHnE = x_BTE.reshape(n_batch, seq_len, self.heads, self.steps, -1)
        return jnp.moveaxis(x_BTHnE, 3, 2).reshape(n_batch, seq_len * self.steps, width // self.steps)

    def _at_step(self, x_BTHx: Array, step: int) -> Array:
        """Place per-token values [B, T, H, ...] at one step, with zeros at the others.

        Returns [B, n T, H, ...].
        """
        n_batch, seq_len, *rest = x_BTHx.shape
        around = [(0, 0), (0, 0), (step, self.steps - 1 - step)] + [(0, 0)] * len(rest)
        return jnp.pad(x_BTHx[:, :, None], around).reshape(n_batch, seq_len * self.steps, *rest)

    def _inputs(self, x_BTD: Array, q_BTE: Array, k_BTE: Array, v_BTE: Array) -> tuple[Array | None, ...]:
        made: Any = super()._inputs(x_BTD, q_BTE, self._in_order(k_BTE), self._in_order(v_BTE))
        q_BTHK, k_BSHK, v_BSHV, beta_BTE, log_g_BTH = made
        q_BSHK = self._at_step(q_BTHK, self.steps - 1)
        log_g_BSH = None if log_g_BTH is None else self._at_step(log_g_BTH, 0)
        return q_BSHK, k_BSHK, v_BSHV, self.beta_scale * self._in_order(beta_BTE), log_g_BSH

    def _recurrence(self, operands: Any, s_BHKV: Array | None) -> tuple[Array, Array]:
        o_BSHV, s_BHKV = super()._recurrence(operands, s_BHKV)
        n_batch, n_steps, *rest = o_BSHV.shape
        return o_BSHV.reshape(n_batch, n_steps // self.steps, self.steps, *rest)[:, :, -1], s_BHKV
