"""GLA, gated linear attention: a matrix state with a data-dependent decay.

    q, k, v = x W;  q / sqrt(K);  g = log sigmoid((x F_1) F_2 + b) / 16
    S_t = diag(e^{g_t}) S_{t-1} + k_t (x) v_t;   y_t = q_t^T S_t                            (ops/linear_attention.py)
    out = (RMSNorm(y) * silu(x W_g)) W_o

Yang et al., arXiv 2312.06635; public implementation: flash-linear-attention, `fla/layers/gla.py`. There are no
convolutions and no positions; F_1 has 16 columns. At 768 x 12: 4 heads with keys of 96 and values of 192, SwiGLU of
2048, RMSNorm with eps 1e-6; 109.8M parameters, tied. The decay, the state and the arithmetic of norm and gate are
float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.mixers import base
from seqjax.nn.layers import Linear, RMSNorm, project_float32, save_inputs
from seqjax.ops.head_norm import head_norm
from seqjax.ops.linear_attention import wkv6
from seqjax.types import Array


class GlaCache(NamedTuple):
    """The float32 state."""

    s_BHKV: Array


class GLA(base.RecurrentMixer):
    """Linear attention with its projections, decay, norm and output gate."""

    resets = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,  # summed over heads; None = half the model width
        value_dim: int | None = None,  # summed over heads; None = model width
        decay_rank: int = 16,
        gate: bool = True,  # output gate
        norm_eps: float = 1e-6,
        chunk_size: int = 64,  # tokens per chunk; affects the speed, not the result
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        key_dim, value_dim = dim // 2 if key_dim is None else key_dim, dim if value_dim is None else value_dim
        base.at_least(1, heads=heads, decay_rank=decay_rank, chunk_size=chunk_size)
        base.divided(heads, key_dim=key_dim, value_dim=value_dim)
        self.heads, self.key_width, self.value_width = heads, key_dim, value_dim
        self.chunk_size, self.implementation = chunk_size, implementation
        self.q = Linear(dim, key_dim, axes=("embed", "heads"), rngs=rngs)
        self.k = Linear(dim, key_dim, axes=("embed", "heads"), rngs=rngs)
        self.v = Linear(dim, value_dim, axes=("embed", "heads"), rngs=rngs)
        self.decay_in = Linear(dim, decay_rank, axes=("embed", "rank"), rngs=rngs)
        self.decay_out = Linear(decay_rank, key_dim, axes=("rank", "heads"), bias=True, rngs=rngs)
        self.gate = Linear(dim, value_dim, axes=("embed", "heads"), rngs=rngs) if gate else None
        self.norm = RMSNorm(value_dim // heads, eps=norm_eps, axis=None, rngs=rngs)
        # As in fla's models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(value_dim, dim, axes=("heads", "embed"), rngs=rngs)

    def prefill(self, x_BTD: Array, cache: GlaCache, segments: Array | None = None) -> tuple[Array, GlaCache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        q_BTHK, k_BTHK, v_BTHV = (self._split_heads(linear(x_BTD)) for linear in (self.q, self.k, self.v))
        result: Any = wkv6(
            q_BTHK * q_BTHK.shape[-1] ** -0.5,
            k_BTHK,
            v_BTHV,
            save_inputs(self._log_decay)(x_BTD),
            None,
            initial_state=cache.s_BHKV,
            return_state=True,
            segments=segments,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        o_BTHV, s_BHKV = result
        gate_BTE = None if self.gate is None else self.gate(x_BTD)
        y_BTE = head_norm(o_BTHV, gate_BTE, gain=self.norm.g[...], eps=self.norm.eps)
        return self.out(y_BTE), GlaCache(s_BHKV)

    def _split_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.heads, -1)

    def _log_decay(self, x_BTD: Array) -> Array:
        """Return the log decay, float32 [B, T, H, K]."""
        return self._split_heads(jax.nn.log_sigmoid(project_float32(self.decay_out, self.decay_in(x_BTD)))) / 16

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> GlaCache:
        """Return an empty cache; it does not depend on `max_len`."""
        del max_len, dtype
        shape = (batch, self.heads, self.key_width // self.heads, self.value_width // self.heads)
        return GlaCache(jnp.zeros(shape, jnp.float32))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token of the chunked recurrence.

        Counts the scores and their product with v over half a chunk, the state update and the state read.
        """
        chunk = min(self.chunk_size, seq_len)
        state = self.key_width * self.value_width / self.heads
        return (self.key_width + self.value_width) * (chunk + 1) + 4 * state
