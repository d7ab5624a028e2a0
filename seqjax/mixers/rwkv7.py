"""RWKV-7: a matrix state with a decay per channel and a learned, partial removal of what a key holds.

    x_* = lerp(x; mu_*) for r, w, k, v, a, g;   r, k, v = x_r W_r, x_k W_k, x_v W_v
    lw = -e^{-1/2} sigmoid(w0 + tanh(x_w w1) w2);   eta = sigmoid(a0 + (x_a a1) a2);   g = sigmoid(x_g g1) g2
    v += (v_first - v) sigmoid(v0 + (x_v v1) v2)  in every layer but the first, whose v is v_first
    kappa = normalize_per_head(k * k_k);   k = k * (1 + (eta - 1) * k_a)
    S_t = diag(e^{lw}) S_{t-1} + kappa*eta (-kappa^T S_{t-1}) + k v^T;   y = S^T r                  (ops/wkv7.py)
    out = ((GroupNorm(y) + (sum_n r k r_k) v) * g) W_o

Peng et al., arXiv 2503.14456; public implementation BlinkDL/RWKV-LM, RWKV-v7. Ranks 64 (w, a), 32 (v), 128 (g) at width
768, as published; 114.9M parameters tied, 139.5M untied, without the v-LoRA that the first layer has but does not use
(49,920 more), because layers share one structure. Deviation: with a tied embedding, N(0, 0.02^2) instead of U(+-1e-4).
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.mixers._rwkv import GroupNorm, RwkvBlock, depth, group_norm_gain, lerp, ramp, token_shift
from seqjax.mixers.base import Carry
from seqjax.nn.initializers import constant, orthogonal, values
from seqjax.nn.layers import Linear
from seqjax.nn.params import param
from seqjax.ops.wkv7 import wkv7
from seqjax.types import Array, LayerSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Ranks of the low-rank maps; 0 = as published for the model's width."""

    name: str
    heads: int
    decay_rank: int = 0
    eta_rank: int = 0
    value_rank: int = 0
    gate_rank: int = 0
    chunk_size: int = 64  # a matter of speed, not of the result

    def check(self, *, dim: int, seq_len: int) -> None:
        """Raise `UserError` where these settings do not fit the model."""
        del seq_len
        if self.heads < 1 or dim % self.heads:
            raise UserError(f"config.model.mixer.heads={self.heads} does not divide config.model.dim={dim}.")
        if not 1 <= self.chunk_size <= 128:
            raise UserError(
                f"config.model.mixer.chunk_size={self.chunk_size} must be 1 to 128: over more positions the decay "
                "does not fit float32."
            )


def rank(dim: int, factor: float, power: float) -> int:
    """Apply a published rule: factor * dim ** power, rounded to a multiple of 32 and at least 32."""
    return max(32, 32 * round(factor * dim**power / 32))


def lora_ranks(config: Any, dim: int) -> tuple[int, int, int, int]:
    """Return the ranks of w, a, v and g: 64, 64, 32 and 128 at a width of 768."""
    return (
        config.decay_rank or rank(dim, 1.8, 0.5),
        config.eta_rank or rank(dim, 1.8, 0.5),
        value_rank(config, dim),
        gate_rank(config, dim),
    )


def value_rank(config: Any, dim: int) -> int:
    """Return the rank of the value residual."""
    return config.value_rank or rank(dim, 1.3, 0.5)


def gate_rank(config: Any, dim: int) -> int:
    """Return the rank of the output gate."""
    return config.gate_rank or rank(dim, 0.6, 0.8)


class Lora(nnx.Module):
    """b + act(x A) B; A starts as zero and B as a tenth of an orthogonal matrix."""

    def __init__(self, dim: int, n_rank: int, *, bias: Any = None, activation: Any = None, rngs: nnx.Rngs):
        self.activation = activation
        self.a = param(rngs, constant(0.0), (dim, n_rank), ("embed", "rank"))
        self.b = param(rngs, orthogonal(0.1), (n_rank, dim), ("rank", "heads"))
        self.bias = None if bias is None else param(rngs, values(bias), (dim,), ("heads",))

    def __call__(self, x: Array) -> Array:
        """Map [..., D] to float32 [..., D], because most results go into a sigmoid."""
        hidden = x @ self.a[...].astype(x.dtype)
        hidden = hidden if self.activation is None else self.activation(hidden)
        y = jnp.matmul(hidden, self.b[...].astype(x.dtype), preferred_element_type=jnp.float32)
        return y if self.bias is None else y + self.bias[...]


class ValueResidual(Lora):
    """The value residual: v + (v_first - v) sigmoid(v0 + (x_v v1) v2), in every layer but the first.

    `v_first` holds the values of the first layer, which reach the others in the block's `carry`.
    """

    def __init__(self, dim: int, n_rank: int, *, rngs: nnx.Rngs):
        super().__init__(dim, n_rank, bias=0.73 - 0.4 * centred(dim), rngs=rngs)

    def move(self, x_BTD: Array, v_BTD: Array, v_first_BTD: Array, layer: Array | int) -> Array:
        """Return the values of `layer`, moved towards those of the first by a share that `x_BTD` decides."""
        share_BTD = jax.nn.sigmoid(self(x_BTD))
        moved_BTD = v_BTD + (v_first_BTD.astype(jnp.float32) - v_BTD) * share_BTD
        return jnp.where(layer == 0, v_BTD, moved_BTD.astype(v_BTD.dtype))


class TokenShift(nnx.Module):
    """One token shift per name; mu starts as 1 - (n / D) ** (power * kappa)."""

    def __init__(self, names: str, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.names = names
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        for name in names:
            mu = 1 - ramp(spec.dim, powers[name] * depth(spec)[1])
            setattr(self, name, param(rngs, values(mu), (spec.dim,), ("embed",)))

    def __call__(self, x_BTD: Array, last_BD: Array | None) -> dict[str, Array]:
        """Return [B, T, D] moved towards the token before, by name; `last_BD` is what came before the first."""
        delta_BTD = token_shift(x_BTD, last_BD) - x_BTD
        return {name: lerp(x_BTD, delta_BTD, getattr(self, name)) for name in self.names}


def centred(dim: int) -> Array:
    """Return a ramp from -1/2 to 1/2 over the channels."""
    return jnp.arange(dim) / max(1, dim - 1) - 0.5


class TimeMix(base.Mixer):
    """A time mix that takes the first layer's values from its block; alone it is a first layer."""

    @abc.abstractmethod
    def time_mix(
        self, x_BTD: Array, cache: Any, *, v_first_BTD: Array | None = None, layer: Array | int = 0
    ) -> tuple[Array, Array, Any]:
        """Return the output, this layer's own values [B, T, D] and the cache; `cache` is None in training."""

    def __call__(self, x_BTD: Array) -> Array:
        """Apply a first layer to a whole sequence."""
        return self.time_mix(x_BTD, None)[0]

    def prefill(self, x_BTD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply a first layer to a prompt and fill its cache."""
        y_BTD, _, cache = self.time_mix(x_BTD, cache)
        return y_BTD, cache

    def step(self, x_BD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply a first layer to one token."""
        y_BTD, cache = self.prefill(x_BD[:, None], cache)
        return y_BTD[:, 0], cache


class Block(RwkvBlock):
    """The block of RWKV-7; the first layer's values travel in `carry` under "v_first"."""

    version = 7
    mixer: TimeMix

    def init_carry(self, x: Array) -> Carry:
        """Return zeros in the place of the first layer's values."""
        return {"v_first": jnp.zeros_like(x)}

    def time_mix(self, h_BTD: Array, carry: Carry, cache: Any, layer: Array) -> tuple[Array, Carry, Any]:
        """Apply the time mix, and put the first layer's values into `carry`."""
        v_first_BTD = carry["v_first"]
        y_BTD, v_BTD, cache = self.mixer.time_mix(h_BTD, cache, v_first_BTD=v_first_BTD, layer=layer)
        v_first_BTD = jnp.where(layer == 0, v_BTD.astype(v_first_BTD.dtype), v_first_BTD)
        return y_BTD, {**carry, "v_first": v_first_BTD}, cache


class Rwkv7Cache(NamedTuple):
    """The state, float32 with the key index first, and the token before."""

    s_BHKV: Array
    last_BD: Array


class Mixer(TimeMix):
    """The time mix of RWKV-7."""

    block = Block

    def __init__(self, config: Any, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.config = config
        self.dim, self.head_dim = spec.dim, spec.dim // config.heads
        dim = spec.dim
        rho = depth(spec)[0]
        linear_D = centred(dim)
        position_D = (jnp.arange(dim) % self.head_dim) * 2 / max(1, self.head_dim - 1) - 1
        zigzag_D = position_D * jnp.abs(position_D)
        decay_D = -6 + 6 * (linear_D + 0.5) ** (1 + rho**0.3) + 0.5 + 2.5 * zigzag_D
        ranks = lora_ranks(config, dim)

        def linear(scale: float) -> Linear:
            return Linear(dim, dim, axes=("embed", "heads"), init=orthogonal(scale), rngs=rngs)

        def vector(x: Any) -> nnx.Param:
            return param(rngs, values(x), (dim,), ("heads",))

        self.mu = TokenShift("rwkvag", spec, rngs=rngs)
        self.r, self.k, self.v = linear(1.0), linear(0.1), linear(1.0)
        self.w_lora = Lora(dim, ranks[0], bias=decay_D, activation=jnp.tanh, rngs=rngs)
        self.a_lora = Lora(dim, ranks[1], bias=-0.19 + 0.3 * zigzag_D + 0.4 * linear_D, rngs=rngs)
        self.v_lora = ValueResidual(dim, ranks[2], rngs=rngs)
        self.g_lora = Lora(dim, ranks[3], activation=jax.nn.sigmoid, rngs=rngs)
        self.k_k, self.k_a, self.r_k = vector(0.71 - 0.1 * linear_D), vector(1.02), vector(-0.04)
        self.norm = GroupNorm(config.heads, self.head_dim, gain=group_norm_gain(spec), rngs=rngs)
        self.out = Linear(dim, dim, axes=("heads", "embed"), init=constant(0.0), rngs=rngs)

    def time_mix(
        self, x_BTD: Array, cache: Any, *, v_first_BTD: Array | None = None, layer: Array | int = 0
    ) -> tuple[Array, Array, Any]:
        """Return the output, this layer's own values [B, T, D] and the cache; `cache` is None in training."""
        dtype = x_BTD.dtype
        x = self.mu(x_BTD, None if cache is None else cache.last_BD)
        r_BTD, k_BTD, own_v_BTD = self.r(x["r"]), self.k(x["k"]), self.v(x["v"])
        v_BTD = own_v_BTD
        if v_first_BTD is not None:
            v_BTD = self.v_lora.move(x["v"], own_v_BTD, v_first_BTD, layer)
        log_w_BTD = -jnp.exp(-0.5) * jax.nn.sigmoid(self.w_lora(x["w"]))
        eta_BTD = jax.nn.sigmoid(self.a_lora(x["a"]))
        gate_BTD = self.g_lora(x["g"])
        kappa = self._split_heads(k_BTD.astype(jnp.float32) * self.k_k[...])
        kappa_BTHK = kappa * jax.lax.rsqrt(jnp.maximum(jnp.sum(kappa * kappa, -1, keepdims=True), 1e-24))
        k_BTD = (k_BTD * (1 + (eta_BTD - 1) * self.k_a[...])).astype(dtype)

        r_BTHK, k_BTHK, v_BTHV, log_w_BTHK, eta_BTHK = (
            self._split_heads(y) for y in (r_BTD, k_BTD, v_BTD, log_w_BTD, eta_BTD)
        )
        result: Any = wkv7(
            r_BTHK,
            k_BTHK,
            v_BTHV,
            log_w_BTHK,
            -kappa_BTHK.astype(dtype),
            (kappa_BTHK * eta_BTHK).astype(dtype),
            initial_state=None if cache is None else cache.s_BHKV,
            return_state=True,
            chunk_size=self.config.chunk_size,
        )
        o_BTHV, s_BHKV = result
        r_k_HK = self._split_heads(self.r_k[...])
        bonus_BTHV = jnp.sum(r_BTHK.astype(jnp.float32) * k_BTHK * r_k_HK, -1, keepdims=True) * v_BTHV
        y_BTD = (self.norm(o_BTHV) + bonus_BTHV.reshape(x_BTD.shape)) * gate_BTD
        if cache is not None:
            cache = Rwkv7Cache(s_BHKV, x_BTD[:, -1].astype(cache.last_BD.dtype))
        return self.out(y_BTD.astype(dtype)), own_v_BTD, cache

    def _split_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.config.heads, self.head_dim)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Rwkv7Cache:
        """Return a cache that has seen no token; it does not depend on `max_len`."""
        del max_len
        shape = (batch, self.config.heads, self.head_dim, self.head_dim)
        return Rwkv7Cache(jnp.zeros(shape, jnp.float32), jnp.zeros((batch, self.dim), dtype))

    def flops_per_token(self, seq_len: int) -> float:
        """Count the recurrence: decay, a^T S, two rank-one updates and r^T S are 9 operations per state entry."""
        del seq_len
        return 9 * self.dim * self.head_dim
