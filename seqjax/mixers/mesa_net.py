"""MesaNet: linear attention with the read that minimises the regularised squared error of all past tokens.

    q, k = L2(silu(conv4(x W)));  v = x W_v;  g = log sigmoid(x W_a + b_a);  beta = sigmoid(x W_b + b_b)
    G_t = e^{g_t} G_{t-1} + beta_t k_t k_t^T,   S_t = e^{g_t} S_{t-1} + beta_t k_t v_t^T
    y_t = RMSNorm(S_t^T (G_t + diag(lambda))^{-1} q_t),   lambda = softplus(l) + 1/4 per key channel;   out = y W_o

q is not scaled. von Oswald et al., arXiv 2506.05233; public implementation: flash-linear-attention,
`fla/layers/mesa_net.py`. Biases start at 0, hence decays at 1/2, and lambda at 1. Thirty steps of conjugate gradients
solve the systems (`ops/mesa.py`), in training and in decoding. At 768 x 12: 12 heads of 64, SwiGLU of 2048, RMSNorm
with eps 1e-6; 109.8M parameters, tied. There is an XLA form only; it computes 30 linear attentions per layer.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.nn.initializers import GPT_INIT, constant
from seqjax.nn.layers import Linear, RMSNorm, project_float32
from seqjax.nn.params import param
from seqjax.nn.short_conv import ShortConv
from seqjax.ops.head_norm import head_norm
from seqjax.ops.mesa import mesa
from seqjax.types import Array


class MesaCache(NamedTuple):
    """G and S side by side, float32, and the last inputs of the two convolutions."""

    s_BHKV: Array
    q_BWE: Array
    k_BWE: Array


class MesaNet(base.RecurrentMixer):
    """Linear attention with the optimal regularised read."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,  # summed over heads; None = model width
        value_dim: int | None = None,  # summed over heads; None = model width
        steps: int = 30,  # of conjugate gradients
        min_ridge: float = 0.25,  # lower bound of lambda, below 1
        gate: bool = False,  # multiplies the normalised outputs by silu(x W), a gate per channel
        conv_width: int = 4,
        conv: bool = True,  # False removes the convolutions; SiLU and the norm of q and k remain
        norm_eps: float = 1e-6,
        chunk_size: int = 64,  # tokens per chunk; affects the speed, not the result
        rngs: nnx.Rngs,
    ):
        key_dim, value_dim = dim if key_dim is None else key_dim, dim if value_dim is None else value_dim
        base.at_least(1, heads=heads, steps=steps, conv_width=conv_width, chunk_size=chunk_size)
        base.divided(heads, key_dim=key_dim, value_dim=value_dim)
        if not 0 < min_ridge < 1:
            raise UserError(f"min_ridge={min_ridge} must be above 0 and below 1, the initial lambda.")
        self.heads, self.key_width, self.value_width = heads, key_dim, value_dim
        self.steps, self.min_ridge, self.chunk_size = steps, min_ridge, chunk_size
        conv_options: Any = {"width": conv_width if conv else None, "init": GPT_INIT, "axis": "heads", "rngs": rngs}
        self.q = Linear(dim, key_dim, axes=("embed", "heads"), rngs=rngs)
        self.k = Linear(dim, key_dim, axes=("embed", "heads"), rngs=rngs)
        self.v = Linear(dim, value_dim, axes=("embed", "heads"), rngs=rngs)
        self.q_conv = ShortConv(key_dim, l2_heads=heads, **conv_options)
        self.k_conv = ShortConv(key_dim, l2_heads=heads, **conv_options)
        self.decay = Linear(dim, heads, axes=("embed", "heads"), bias=True, rngs=rngs)
        self.beta = Linear(dim, heads, axes=("embed", "heads"), bias=True, rngs=rngs)
        self.ridge_E = param(rngs, constant(math.log(math.expm1(1 - min_ridge))), (key_dim,), ("heads",))
        self.gate = Linear(dim, value_dim, axes=("embed", "heads"), rngs=rngs) if gate else None
        self.norm = RMSNorm(value_dim // heads, eps=norm_eps, axis=None, rngs=rngs)
        # As in fla's models, and unlike GPT, the initial values of this matrix are not scaled down.
        self.out = Linear(value_dim, dim, axes=("heads", "embed"), rngs=rngs)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> MesaCache:
        """Return an empty cache; it does not depend on `max_len`."""
        del max_len
        n_key, n_value = self.key_width // self.heads, self.value_width // self.heads
        s_BHKV = jnp.zeros((batch, self.heads, n_key, n_key + n_value), jnp.float32)
        return MesaCache(s_BHKV, self.q_conv.init_cache(batch, dtype), self.k_conv.init_cache(batch, dtype))

    def prefill(self, x_BTD: Array, cache: MesaCache) -> tuple[Array, MesaCache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        q_BTE, q_BWE = self.q_conv.extend(self.q(x_BTD), cache.q_BWE)
        k_BTE, k_BWE = self.k_conv.extend(self.k(x_BTD), cache.k_BWE)
        q_BTHK, k_BTHK, v_BTHV = (x.reshape(*x.shape[:2], self.heads, -1) for x in (q_BTE, k_BTE, self.v(x_BTD)))
        o_BTHV, s_BHKV = mesa(
            q_BTHK,
            k_BTHK,
            v_BTHV,
            jax.nn.log_sigmoid(project_float32(self.decay, x_BTD)),
            jax.nn.sigmoid(project_float32(self.beta, x_BTD)),
            (jax.nn.softplus(self.ridge_E[...]) + self.min_ridge).reshape(self.heads, -1),
            n_steps=self.steps,
            initial_state=cache.s_BHKV,
            chunk_size=self.chunk_size,
        )
        gate_BTE = None if self.gate is None else self.gate(x_BTD)
        gain, eps = self.norm.g[...], self.norm.eps
        y_BTE = head_norm(o_BTHV.astype(x_BTD.dtype), gate_BTE, gain=gain, activation="silu", eps=eps)
        return self.out(y_BTE), MesaCache(s_BHKV, q_BWE, k_BWE)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs of the conjugate-gradient steps and the read, per token."""
        product, read = self._flops(seq_len)
        return self.steps * product + read

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs with the backward pass: a second solve, and the gradient of one product and the read."""
        product, read = self._flops(seq_len)
        return (2 * self.steps + 2) * product + 3 * read

    def _flops(self, seq_len: int) -> tuple[float, float]:
        """Return the FLOPs of one product with G, and of the read, per token."""
        pairs = (min(self.chunk_size, seq_len) + 1) / 2
        n_key, n_value = self.key_width // self.heads, self.value_width // self.heads

        def linear_attention(n_out: int) -> float:
            return 2 * self.heads * ((n_key + n_out) * pairs + 2 * n_key * n_out)

        return linear_attention(n_key), linear_attention(n_key + n_value)
