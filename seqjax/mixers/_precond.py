"""The preconditioned delta rules: written keys are scaled by a curvature estimate.

    A_t = e^{g'_t} A_{t-1} + beta'_t k_t^2         per key channel; g' = -exp(A'_log) softplus(x W'_a + dt'_bias) and
                                                   beta' = sigmoid(x W'_b) per head, in addition to the rule's g, beta
    u_t = ln(A_t + 1e-6) - m,  M_t = c^{-u_t / (1 + |u_t|)}         m per head, -0.2 at first
    S <- e^{g_t} S_{t-1};  S_t = S + (M_t * k_t) (x) beta_t (v_t - k_t^T S);  y_t = q_t^T S_t

arXiv 2604.21100; public implementation: flash-linear-attention, `fla/ops/precond_gated_delta_rule/naive.py` and
`fla/ops/precond_kda/naive.py`. A includes the current token; keys are L2-normalised before they enter A. The plain key
predicts and the scaled key is written. M is between 1 / c and c, so c = 1 is the plain rule; above c = 2 an
eigenvalue 1 - beta M may fall below -1. The recurrence is RWKV-7's (`ops/wkv7.py`) with a = -e^g k and keys
beta M k. A, M and the gates are float32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import kernels_pallas
from seqjax.errors import UserError
from seqjax.mixers._delta import DeltaCache, DeltaMixer, LowRankDeltaMixer
from seqjax.nn.initializers import constant, dt_bias, log_uniform
from seqjax.nn.layers import Linear, project_float32, save_inputs
from seqjax.nn.params import param
from seqjax.ops.ssd import FLOOR
from seqjax.sharding import heads_to_time, time_to_heads
from seqjax.types import Array

CHUNK = 32
EPS = 1e-6


class Preconditioner(nnx.Module):
    """The factors M of the written keys.

    `bound` is c. `slowest` is the lowest initial decay rate; rates start uniform between it and 16.
    """

    def __init__(self, dim: int, *, heads: int, bound: float, slowest: float, rngs: nnx.Rngs):
        if not 1 <= bound <= 2:
            raise UserError(f"precond_bound={bound} must be between 1 and 2; 1.5 is the published one.")
        self.bound = bound
        self.decay = Linear(dim, heads, axes=("embed", "heads"), rngs=rngs)
        self.beta = Linear(dim, heads, axes=("embed", "heads"), rngs=rngs)
        self.log_rate_H = param(rngs, log_uniform(slowest, 16.0), (heads,), ("heads",))
        self.step_bias_H = param(rngs, dt_bias, (heads,), ("heads",))
        self.center_H = param(rngs, constant(-0.2), (heads,), ("heads",))

    def __call__(self, x_BTD: Array, k_BTHK: Array, curvature_BHK: Array) -> tuple[Array, Array]:
        """Return M, float32 [B, T, H, K], and A after the last token, float32 [B, H, K].

        `k_BTHK` is float32; `curvature_BHK` is A before the first token.
        """
        dt_BTH = jax.nn.softplus(project_float32(self.decay, x_BTD) + self.step_bias_H[...])
        log_g_BTH = -jnp.exp(self.log_rate_H[...]) * dt_BTH
        beta_BTH = jax.nn.sigmoid(project_float32(self.beta, x_BTD))
        curvature_BTHK, last_BHK = decayed_sums(beta_BTH[..., None] * k_BTHK**2, log_g_BTH, curvature_BHK)
        u_BTHK = jnp.log(curvature_BTHK + EPS) - self.center_H[...][:, None]
        return jnp.exp(-math.log(self.bound) * u_BTHK / (1 + jnp.abs(u_BTHK))), last_BHK


def decayed_sums(x_BTHK: Array, log_g_BTH: Array, initial_BHK: Array) -> tuple[Array, Array]:
    """Return A_t = e^{g_t} A_{t-1} + x_t at all positions and after the last one.

    All arrays are float32 and the products have full precision. A chunk of `CHUNK` tokens is one product per head.
    """
    seq_len = x_BTHK.shape[1]
    if seq_len == 1:  # decoding
        last_BHK = jnp.exp(log_g_BTH[:, 0, :, None]) * initial_BHK + x_BTHK[:, 0]
        return last_BHK[:, None], last_BHK
    chunk = min(CHUNK, seq_len)
    x_BcCHK, log_g_BcCH = (
        kernels_pallas.split_chunks(time_to_heads(x), chunk) for x in (x_BTHK, jnp.maximum(log_g_BTH, FLOOR))
    )
    g_BcCH = jnp.cumsum(log_g_BcCH, axis=2)
    later_CC1 = jnp.tri(chunk, dtype=bool)[..., None]
    decay_BcCCH = jnp.exp(jnp.where(later_CC1, g_BcCH[:, :, :, None] - g_BcCH[:, :, None], -jnp.inf))
    within_BcCHK = jnp.einsum("bcijh,bcjhk->bcihk", decay_BcCCH, x_BcCHK, precision="highest")
    kept_BcCH1 = jnp.exp(g_BcCH)[..., None]
    starts_BcHK, last_BHK = kernels_pallas.state_passing(kept_BcCH1[:, :, -1], within_BcCHK[:, :, -1], initial_BHK)
    sums_BcCHK = within_BcCHK + kept_BcCH1 * starts_BcHK[:, :, None]
    return heads_to_time(kernels_pallas.join_chunks(sums_BcCHK, seq_len)), last_BHK


class PrecondMixer(LowRankDeltaMixer):
    """The base of the preconditioned mixers; a subclass sets `precond`.

    The cached state is [B, H, K, V + 1]: the last column is A.
    """

    precond: Preconditioner

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> DeltaCache:
        """Return an empty cache; it does not depend on `max_len`."""
        cache = super().init_cache(batch, max_len, dtype)
        return cache._replace(s_BHKV=jnp.pad(cache.s_BHKV, ((0, 0), (0, 0), (0, 0), (0, 1))))

    def _inputs(self, x_BTD: Array, q_BTE: Array, k_BTE: Array, v_BTE: Array) -> tuple[Array, ...]:
        """Return the inputs; `_recurrence` makes the operands, which depend on A."""
        return x_BTD, q_BTE, k_BTE, v_BTE

    def _operands(self, x_BTD: Array, q_BTE: Array, k_BTE: Array, v_BTE: Array, curvature_BHK: Array) -> Any:
        made: Any = DeltaMixer._inputs(self, x_BTD, q_BTE, k_BTE, v_BTE)
        q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_w_BTHx = made
        dtype, k_BTHK = q_BTHK.dtype, k_BTHK.astype(jnp.float32)
        log_w_BTHK = jnp.broadcast_to(log_w_BTHx.reshape(*k_BTHK.shape[:3], -1), k_BTHK.shape)
        factor_BTHK, curvature_BHK = self.precond(x_BTD, k_BTHK, curvature_BHK)
        a_BTHK = -jnp.exp(log_w_BTHK) * k_BTHK
        k_BTHK = beta_BTH[..., None] * factor_BTHK * k_BTHK
        return q_BTHK, k_BTHK.astype(dtype), v_BTHV, log_w_BTHK, a_BTHK.astype(dtype), curvature_BHK

    def _recurrence(self, operands: Any, s_BHKV: Array | None) -> tuple[Array, Array]:
        x_BTD, *convolved = operands
        s_BHKV = self.init_cache(len(x_BTD), 0, x_BTD.dtype).s_BHKV if s_BHKV is None else s_BHKV
        *operands, curvature_BHK = save_inputs(self._operands)(x_BTD, *convolved, s_BHKV[..., -1])
        o_BTHV, s_BHKV = super()._recurrence(operands, s_BHKV[..., :-1])
        return o_BTHV, jnp.concatenate([s_BHKV, curvature_BHK[..., None]], axis=-1)

    def _recurrent_step(self, operands: Any, s_BHKV: Array) -> tuple[Array, Array]:
        o_BTHV, s_BHKV = self._recurrence([x[:, None] for x in operands], s_BHKV)
        return o_BTHV[:, 0], s_BHKV

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of the recurrence per token.

        In addition to the delta rule's, it counts three operations per key channel for A.
        """
        return super().flops_per_token(seq_len) + 3 * self.key_width
