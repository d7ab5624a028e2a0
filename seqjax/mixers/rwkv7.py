"""RWKV-7: a matrix state with a decay per channel and a learned, partial removal of the value of a key.

    x_* = lerp(x; mu_*) for r, w, k, v, a, g;   r, k, v = x_r W_r, x_k W_k, x_v W_v
    lw = -e^{-1/2} sigmoid(w0 + tanh(x_w w1) w2);   eta = sigmoid(a0 + (x_a a1) a2);   g = sigmoid(x_g g1) g2
    v += (v_first - v) sigmoid(v0 + (x_v v1) v2)  in every layer but the first, whose v is v_first
    kappa = normalize_per_head(k * k_k);   k = k * (1 + (eta - 1) * k_a)
    S_t = diag(e^{lw}) S_{t-1} + kappa*eta (-kappa^T S_{t-1}) + k v^T;   y = S^T r                  (ops/wkv7.py)
    out = ((GroupNorm(y) + (sum_n r k r_k) v) * g) W_o

Peng et al., arXiv 2503.14456; public implementation BlinkDL/RWKV-LM, RWKV-v7. Ranks 64 (w, a), 32 (v), 128 (g) at width
768, as published. 114.9M parameters tied, 139.5M untied, not counting the first layer's unused v-LoRA (49,920), which
exists because layers share one structure. Deviation: with a tied embedding, N(0, 0.02^2) instead of U(+-1e-4).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.mixers import base
from seqjax.mixers._rwkv import GroupNorm, depth, group_norm_gain
from seqjax.mixers._rwkv7 import Block, Lora, TimeMix, TokenShift, ValueResidual, centred, rank
from seqjax.mixers._rwkv7 import gate_rank as published_gate_rank
from seqjax.mixers._rwkv7 import value_rank as published_value_rank
from seqjax.nn.initializers import constant, orthogonal, values
from seqjax.nn.layers import Linear, save_inputs
from seqjax.nn.params import param
from seqjax.ops.wkv7 import wkv7
from seqjax.types import Array, Layer
from seqjax.utils import UserError


def lora_ranks(
    dim: int,
    *,
    decay_rank: int | None = None,
    eta_rank: int | None = None,
    value_rank: int | None = None,
    gate_rank: int | None = None,
) -> tuple[int, int, int, int]:
    """Return the ranks of w, a, v and g, by default the published ones: 64, 64, 32 and 128 at a width of 768."""
    return (
        decay_rank or rank(dim, 1.8, 0.5),
        eta_rank or rank(dim, 1.8, 0.5),
        value_rank or published_value_rank(dim),
        gate_rank or published_gate_rank(dim),
    )


class Rwkv7Cache(NamedTuple):
    """The float32 state with the key index first, and the previous token's input."""

    s_BHKV: Array
    last_BD: Array


class RWKV7(TimeMix):
    """The time mix of RWKV-7.

    Outside a model it acts as a first layer, whose values later layers mix in: the value residual (`v_lora`) has no
    effect and gets no gradient.
    """

    block = Block

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        decay_rank: int | None = None,  # this and the other ranks: None = as published for the model's width
        eta_rank: int | None = None,
        value_rank: int | None = None,
        gate_rank: int | None = None,
        chunk_size: int = 64,  # tokens per chunk; affects the speed, not the result
        implementation: str | None = None,
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        if heads < 1 or dim % heads:
            raise UserError(f"heads={heads} does not divide dim={dim}; choose heads that do.")
        ranks = {"decay_rank": decay_rank, "eta_rank": eta_rank, "value_rank": value_rank, "gate_rank": gate_rank}
        base.at_least(1, **ranks)
        if not 1 <= chunk_size <= 128:
            raise UserError(
                f"chunk_size={chunk_size} must be 1 to 128: over more positions the decay does not fit float32."
            )
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads
        self.chunk_size, self.implementation = chunk_size, implementation
        rho = depth(layer)[0]
        linear_D = centred(dim)
        position_D = (jnp.arange(dim) % self.head_dim) * 2 / max(1, self.head_dim - 1) - 1
        zigzag_D = position_D * jnp.abs(position_D)
        decay_D = -6 + 6 * (linear_D + 0.5) ** (1 + rho**0.3) + 0.5 + 2.5 * zigzag_D
        n_w, n_a, n_v, n_g = lora_ranks(dim, **ranks)

        def linear(scale: float) -> Linear:
            return Linear(dim, dim, axes=("embed", "heads"), init=orthogonal(scale), rngs=rngs)

        def vector(x: Any) -> nnx.Param:
            return param(rngs, values(x), (dim,), ("heads",))

        self.mu = TokenShift("rwkvag", dim, layer, rngs=rngs)
        self.r, self.k, self.v = linear(1.0), linear(0.1), linear(1.0)
        self.w_lora = Lora(dim, n_w, bias=decay_D, activation=jnp.tanh, rngs=rngs)
        self.a_lora = Lora(dim, n_a, bias=-0.19 + 0.3 * zigzag_D + 0.4 * linear_D, rngs=rngs)
        self.v_lora = ValueResidual(dim, n_v, rngs=rngs)
        self.g_lora = Lora(dim, n_g, activation=jax.nn.sigmoid, rngs=rngs)
        self.k_k, self.k_a, self.r_k = vector(0.71 - 0.1 * linear_D), vector(1.02), vector(-0.04)
        self.norm = GroupNorm(heads, self.head_dim, gain=group_norm_gain(layer), rngs=rngs)
        self.out = Linear(dim, dim, axes=("heads", "embed"), init=constant(0.0), rngs=rngs)

    def time_mix(
        self,
        x_BTD: Array,
        cache: Any,
        *,
        v_first_BTD: Array | None = None,
        layer: Array | int = 0,
        continues: bool = False,
    ) -> tuple[Array, Array, Any]:
        """Return the output, this layer's own values [B, T, D] and the cache; `cache` is None in training."""
        del continues  # an empty cache is a state like any other
        x = self.mu(x_BTD, None if cache is None else cache.last_BD)
        r_BTD, k_BTD, own_v_BTD = self.r(x["r"]), self.k(x["k"]), self.v(x["v"])
        v_BTD = own_v_BTD
        if v_first_BTD is not None:
            v_BTD = self.v_lora.mix(x["v"], own_v_BTD, v_first_BTD, layer)
        r_BTHK, v_BTHV = self._split_heads(r_BTD), self._split_heads(v_BTD)
        k_BTHK, *transition = save_inputs(self._keys)(k_BTD, x["w"], x["a"])
        result: Any = wkv7(
            r_BTHK,
            k_BTHK,
            v_BTHV,
            *transition,
            initial_state=None if cache is None else cache.s_BHKV,
            return_state=True,
            min_log_w=-math.exp(-0.5),
            chunk_size=self.chunk_size,
            implementation=self.implementation,
        )
        o_BTHV, s_BHKV = result
        y_BTD = save_inputs(self._gated)(o_BTHV, r_BTHK, k_BTHK, v_BTHV, x["g"])
        if cache is not None:
            cache = Rwkv7Cache(s_BHKV, x_BTD[:, -1].astype(cache.last_BD.dtype))
        return self.out(y_BTD), own_v_BTD, cache

    def _keys(self, k_BTD: Array, w_BTD: Array, a_BTD: Array) -> tuple[Array, ...]:
        """Return k, log w, a and b of the recurrence, [B, T, H, K], from x_k W_k and the lerps of w and a."""
        dtype = k_BTD.dtype
        log_w_BTD = -jnp.exp(-0.5) * jax.nn.sigmoid(self.w_lora(w_BTD))
        eta_BTD = jax.nn.sigmoid(self.a_lora(a_BTD))
        kappa_BTHK = self._split_heads(k_BTD.astype(jnp.float32) * self.k_k[...])
        square_BTH1 = jnp.sum(kappa_BTHK * kappa_BTHK, -1, keepdims=True)
        kappa_BTHK = kappa_BTHK * jax.lax.rsqrt(jnp.maximum(square_BTH1, 1e-24))
        k_BTD = (k_BTD * (1 + (eta_BTD - 1) * self.k_a[...])).astype(dtype)
        k_BTHK, log_w_BTHK, eta_BTHK = (self._split_heads(y) for y in (k_BTD, log_w_BTD, eta_BTD))
        return k_BTHK, log_w_BTHK, -kappa_BTHK.astype(dtype), (kappa_BTHK * eta_BTHK).astype(dtype)

    def _gated(self, o_BTHV: Array, r_BTHK: Array, k_BTHK: Array, v_BTHV: Array, g_BTD: Array) -> Array:
        """Return the norm per head with the bonus, times the gate, [B, T, D]; `g_BTD` is the gate's lerp."""
        r_k_HK = self._split_heads(self.r_k[...])
        bonus_BTH = jnp.sum(r_BTHK.astype(jnp.float32) * k_BTHK * r_k_HK, -1)
        return self.norm(o_BTHV, self.g_lora(g_BTD, dtype=g_BTD.dtype), (v_BTHV, bonus_BTH))

    def _split_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.heads, self.head_dim)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Rwkv7Cache:
        """Return an empty cache; it does not depend on `max_len`."""
        del max_len
        shape = (batch, self.heads, self.head_dim, self.head_dim)
        return Rwkv7Cache(jnp.zeros(shape, jnp.float32), jnp.zeros((batch, self.dim), dtype))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of the recurrence, 9 per state entry: decay, a^T S, two rank-one updates and r^T S."""
        del seq_len
        return 9 * self.dim * self.head_dim
