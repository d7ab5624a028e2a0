"""mLSTM, xLSTM's matrix memory: linear attention with exponential input gates.

    q, k, v = x W;  q / sqrt(K);   i = cap(x w_i + b_i), f = cap(x w_f + b_f) per head,  cap(z) = 15 tanh(z / 15)
    C_t = sigmoid(f_t) C_{t-1} + e^{i_t} k_t (x) v_t;   n_t = sigmoid(f_t) n_{t-1} + e^{i_t} k_t
    y_t = C_t^T q_t / max(|n_t . q_t|, 1);   out = (LayerNorm(y) * sigmoid(x W_o)) W         per head, gain, no bias

Beck et al., arXiv 2405.04517; the layer of xLSTM 7B, 2503.13427, with the public implementations `xlstm_large` and
transformers' `xlstm`. They divide C, n and 1 by a running maximum of the gates and add 1e-6 to the denominator; capped
gates need neither in float32. n is stored as one more value, which is 1 for every key (ops/linear_attention.py). At 768
x 12: 4 heads with keys of 96 and values of 192, SwiGLU of 2048, RMSNorm with eps 1e-6; 109.6M parameters, tied. The cap
on the logits is omitted. Gates, states and the division are float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.nn.initializers import constant, normal, values
from seqjax.nn.layers import Linear, project_float32, save_inputs
from seqjax.nn.params import param
from seqjax.ops.head_norm import head_norm
from seqjax.ops.linear_attention import wkv6
from seqjax.types import Array, Layer


class MlstmCache(NamedTuple):
    """The float32 state; the last value column is the normaliser n."""

    s_BHKV: Array


class MLSTM(base.RecurrentMixer):
    """Linear attention with its projections, gates, normaliser and norm."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,  # summed over heads; None = half the model width
        value_dim: int | None = None,  # summed over heads; None = model width
        gate: bool = True,  # output gate
        gate_cap: float = 15.0,  # input gates are between e^-cap and e^cap
        norm_eps: float = 1e-6,
        chunk_size: int = 64,  # tokens per chunk; affects the speed, not the result
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        key_dim, value_dim = dim // 2 if key_dim is None else key_dim, dim if value_dim is None else value_dim
        base.at_least(1, heads=heads, chunk_size=chunk_size)
        base.divided(heads, key_dim=key_dim, value_dim=value_dim)
        if not 0 < gate_cap <= 30:
            raise UserError(f"gate_cap={gate_cap} must be above 0 and at most 30: a larger cap can overflow float32.")
        self.heads, self.key_width, self.value_width, self.gate_cap = heads, key_dim, value_dim, gate_cap
        self.norm_eps, self.chunk_size, self.implementation = norm_eps, chunk_size, implementation
        small, zero = normal((2 / (5 * dim)) ** 0.5), constant(0.0)

        def linear(width: int) -> Linear:
            return Linear(dim, width, axes=("embed", "heads"), init=small, rngs=rngs)

        self.q, self.k, self.v = linear(key_dim), linear(key_dim), linear(value_dim)
        self.gate = linear(value_dim) if gate else None
        self.input = Linear(dim, heads, axes=("embed", "heads"), init=zero, rngs=rngs)
        self.forget = Linear(dim, heads, axes=("embed", "heads"), init=zero, rngs=rngs)
        self.input_bias_H = param(rngs, constant(-10.0), (heads,), ("heads",))
        self.forget_bias_H = param(rngs, values(jnp.linspace(3.0, 6.0, heads)), (heads,), ("heads",))
        self.gain_E = param(rngs, constant(1.0), (value_dim,), ("heads",))
        out_init = normal(2 / (layer.n_layers * dim**0.5))
        self.out = Linear(value_dim, dim, axes=("heads", "embed"), init=out_init, rngs=rngs)

    def prefill(self, x_BTD: Array, cache: MlstmCache) -> tuple[Array, MlstmCache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        q_BTHK, k_BTHK, v_BTHV = (self._split_heads(linear(x_BTD)) for linear in (self.q, self.k, self.v))
        i_BTH, f_BTH = project_float32(self.input, x_BTD), project_float32(self.forget, x_BTD)
        k_BTHK, log_w_BTHK = save_inputs(self._gated)(k_BTHK, i_BTH, f_BTH)
        result: Any = wkv6(
            q_BTHK * q_BTHK.shape[-1] ** -0.5,
            k_BTHK,
            jnp.concatenate([v_BTHV, jnp.ones_like(v_BTHV[..., :1])], axis=-1),
            log_w_BTHK,
            None,
            initial_state=cache.s_BHKV,
            return_state=True,
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        o_BTHV, s_BHKV = result
        y_BTE = head_norm(
            save_inputs(_normalised)(o_BTHV),
            None if self.gate is None else self.gate(x_BTD),
            gain=self.gain_E[...],
            bias=jnp.zeros_like(self.gain_E[...]),  # with a bias, even zero, the norm subtracts the mean
            activation="sigmoid",
            eps=self.norm_eps,
        )
        return self.out(y_BTE), MlstmCache(s_BHKV)

    def _split_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.heads, -1)

    def _gated(self, k_BTHK: Array, i_BTH: Array, f_BTH: Array) -> tuple[Array, Array]:
        """Return e^i k in the dtype of k, and the log decay, float32 [B, T, H, K]."""
        i_BTH, f_BTH = self._capped(i_BTH + self.input_bias_H[...]), self._capped(f_BTH + self.forget_bias_H[...])
        log_w_BTH1 = jax.nn.log_sigmoid(f_BTH)[..., None]
        weighted_BTHK = k_BTHK.astype(jnp.float32) * jnp.exp(i_BTH)[..., None]
        return weighted_BTHK.astype(k_BTHK.dtype), jnp.broadcast_to(log_w_BTH1, k_BTHK.shape)

    def _capped(self, z: Array) -> Array:
        return self.gate_cap * jnp.tanh(z / self.gate_cap)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> MlstmCache:
        """Return an empty cache; it does not depend on `max_len`."""
        del max_len, dtype
        shape = (batch, self.heads, self.key_width // self.heads, self.value_width // self.heads + 1)
        return MlstmCache(jnp.zeros(shape, jnp.float32))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token of the chunked recurrence.

        Counts the scores and their product with v over half a chunk, the state update and the state read.
        """
        chunk, read = min(self.chunk_size, seq_len), self.value_width + self.heads
        return (self.key_width + read) * (chunk + 1) + 4 * self.key_width * read / self.heads


def _normalised(o_BTHV: Array) -> Array:
    """Return all values but the last, divided by the last.

    The divisor's magnitude is at least 1.
    """
    o32_BTHV = o_BTHV.astype(jnp.float32)
    return (o32_BTHV[..., :-1] / jnp.maximum(jnp.abs(o32_BTHV[..., -1:]), 1.0)).astype(o_BTHV.dtype)
