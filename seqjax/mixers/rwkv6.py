"""RWKV-6 "Finch": RWKV-5 with data-dependent token shift and decay.

    s = lerp(x; mu_x);  m = tanh(s W_1) -> 5 parts, m_i = part_i W_2[i];  x_i = lerp(x; mu_i + m_i)    i = w, k, v, r, g
    w_t = exp(-exp(omega + tanh(x_w D_1) D_2))                                   per token and channel
    and the recurrence, norm and gate of RWKV-5.

Peng et al., arXiv 2404.05892; public implementation RWKV-LM v6.0. From the product with D_2 on, the decay is float32;
the public code computes it in the model's dtype.
"""

import jax.numpy as jnp
from flax import nnx

from seqjax.mixers import base
from seqjax.mixers._rwkv import RwkvBlock, depth, lerps, ramp
from seqjax.mixers.rwkv5 import RWKV5
from seqjax.nn.initializers import constant, uniform, values
from seqjax.nn.layers import Linear, project_float32, save_inputs
from seqjax.nn.params import param
from seqjax.ops.linear_attention import CHUNK
from seqjax.types import Array, Layer


class Block(RwkvBlock):
    """The RWKV block with ChannelMix v6."""

    version = 6


class RWKV6(RWKV5):
    """The time mix with data-dependent token shift and decay."""

    block = Block
    resets = True

    def __init__(
        self,
        dim: int,
        *,
        head_dim: int = 64,
        shift_rank: int = 32,
        decay_rank: int = 64,
        chunk_size: int = CHUNK,  # tokens per chunk; affects the speed, not the result
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        base.at_least(1, shift_rank=shift_rank, decay_rank=decay_rank)
        self.shift_rank, self.decay_rank = shift_rank, decay_rank
        super().__init__(
            dim, head_dim=head_dim, chunk_size=chunk_size, implementation=implementation, layer=layer, rngs=rngs
        )

    def _init_token_shift(self, layer: Layer, rngs: nnx.Rngs) -> None:
        dim, rank, zeros = self.dim, self.shift_rank, constant(0.0)
        rho, kappa = depth(layer)
        slow_D, fast_D = ramp(dim, kappa), ramp(dim, kappa / 2)
        # Row order as in W_2: w, k, v, r, g.
        mu_PD = jnp.stack([1 - x_D for x_D in (slow_D, slow_D, slow_D + 0.3 * rho, fast_D, fast_D)])
        self.mu_x = param(rngs, values(1 - slow_D), (dim,), ("embed",))
        self.mu = param(rngs, values(mu_PD), (5, dim), ("state", "embed"))
        self.w1 = Linear(dim, 5 * rank, axes=("embed", "rank"), init=zeros, rngs=rngs)
        self.w2 = param(rngs, uniform(0.01), (5, rank, dim), (None, "rank", "embed"))
        self.d1 = Linear(dim, self.decay_rank, axes=("embed", "rank"), init=zeros, rngs=rngs)
        self.d2 = Linear(self.decay_rank, dim, axes=("rank", "heads"), init=uniform(0.01), rngs=rngs)

    def _shifted_inputs(
        self, x_BTD: Array, last_BD: Array, segments: Array | None
    ) -> tuple[Array, Array, Array, Array, Array]:
        (s_BTD,) = lerps(x_BTD, last_BD, (self.mu_x[...],), segments=segments)
        w_BTD, k_BTD, v_BTD, r_BTD, g_BTD = save_inputs(self._lerps)(x_BTD, last_BD, self.w1(s_BTD), segments)
        return r_BTD, k_BTD, v_BTD, g_BTD, save_inputs(self._log_decay)(w_BTD)

    def _lerps(self, x_BTD: Array, last_BD: Array, hidden_BTM: Array, segments: Array | None) -> tuple[Array, ...]:
        """Return the five lerps; W_2 tanh(hidden) is added to each mu."""
        hidden_BTPM = jnp.tanh(hidden_BTM).reshape(*x_BTD.shape[:2], 5, self.shift_rank)
        delta_mu_PBTD = jnp.einsum("btpm,pmd->pbtd", hidden_BTPM, self.w2[...].astype(x_BTD.dtype))
        return lerps(x_BTD, last_BD, tuple(self.mu[...]), delta_mu_PBTD, segments)

    def _log_decay(self, w_BTD: Array) -> Array:
        omega_BTD = self.omega[...] + project_float32(self.d2, jnp.tanh(self.d1(w_BTD)))
        return -jnp.exp(omega_BTD)
