"""RWKV-7: a matrix state with a decay per channel and a learned, partial removal of what a key holds.

    x_* = lerp(x; mu_*) for r, w, k, v, a, g;   r, k, v = x_r W_r, x_k W_k, x_v W_v
    lw = -e^{-1/2} sigmoid(w0 + tanh(x_w w1) w2);   eta = sigmoid(a0 + (x_a a1) a2);   g = sigmoid(x_g g1) g2
    v += (v_first - v) sigmoid(v0 + (x_v v1) v2)  in every layer but the first, whose v is v_first
    kappa = normalize_per_head(k * k_k);   k = k * (1 + (eta - 1) * k_a)
    S_t = diag(e^{lw}) S_{t-1} + kappa*eta (-kappa^T S_{t-1}) + k v^T;   y = S^T r                  (ops/wkv7.py)
    out = ((GroupNorm(y) + (sum_n r k r_k) v) * g) W_o

Peng et al., arXiv 2503.14456; public implementation BlinkDL/RWKV-LM, RWKV-v7. Ranks 64 (w, a), 32 (v), 128 (g) at width
768, as published; 114.9M parameters tied, 139.5M untied, without the v-LoRA that the first layer has but does not use
(49,920 more), because layers share one structure. Deviations: `carry` also counts layers, so that the first knows
itself under scan; with a tied embedding, N(0, 0.02^2) instead of U(+-1e-4).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import _rwkv as common
from seqjax.nn.layers import Linear, constant
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
    """A published rule: factor * dim ** power, rounded to a multiple of 32 and at least 32."""
    return max(32, 32 * round(factor * dim**power / 32))


def lora_ranks(config: Any, dim: int) -> tuple[int, int, int, int]:
    """Of w, a, v, g: 64, 64, 32, 128 at a width of 768."""
    return (
        config.decay_rank or rank(dim, 1.8, 0.5),
        config.eta_rank or rank(dim, 1.8, 0.5),
        config.value_rank or rank(dim, 1.3, 0.5),
        config.gate_rank or rank(dim, 0.6, 0.8),
    )


class Lora(nnx.Module):
    """b + act(x A) B, A zero and B a tenth of an orthogonal matrix at the start."""

    def __init__(self, dim: int, n_rank: int, *, bias: Any = None, activation: Any = None, rngs: nnx.Rngs):
        self.activation = activation
        self.a = param(rngs, constant(0.0), (dim, n_rank), ("embed", "rank"))
        self.b = param(rngs, common.orthogonal(0.1), (n_rank, dim), ("rank", "heads"))
        self.bias = None if bias is None else param(rngs, common.values(bias), (dim,), ("heads",))

    def __call__(self, x: Array) -> Array:
        """[..., D] -> float32 [..., D]: most go into a sigmoid."""
        hidden = x @ self.a[...].astype(x.dtype)
        hidden = hidden if self.activation is None else self.activation(hidden)
        y = jnp.matmul(hidden, self.b[...].astype(x.dtype), preferred_element_type=jnp.float32)
        return y if self.bias is None else y + self.bias[...]


class Rwkv7Cache(NamedTuple):
    """The state, float32, key index first, and the token before."""

    s_BHKV: Array
    last_BD: Array


class Shift(nnx.Module):
    """One token shift per name, mu = 1 - (n / D) ** (power * kappa) at the start."""

    def __init__(self, names: str, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.names = names
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        for name in names:
            mu = 1 - common.ramp(spec.dim, powers[name] * common.depth(spec)[1])
            setattr(self, name, param(rngs, common.values(mu), (spec.dim,), ("embed",)))

    def __call__(self, x_BTD: Array, last_BD: Array | None) -> dict[str, Array]:
        """[B, T, D], moved towards the token before, by name; `last_BD` is what came before the first."""
        delta = common.shift(x_BTD, last_BD) - x_BTD
        return {name: common.lerp(x_BTD, delta, getattr(self, name)) for name in self.names}


def centred(dim: int) -> Array:
    """From -1/2 to 1/2 over the channels."""
    return jnp.arange(dim) / max(1, dim - 1) - 0.5


class Mixer(nnx.Module):
    """The time mix. Called with `v_first` and `is_first` by `Block`; alone it is a first layer."""

    def __init__(self, config: Any, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.config = config
        self.dim, self.head_dim = spec.dim, spec.dim // config.heads
        dim = spec.dim
        rho = common.depth(spec)[0]
        lin = centred(dim)
        position = (jnp.arange(dim) % self.head_dim) * 2 / max(1, self.head_dim - 1) - 1
        zigzag = position * jnp.abs(position)
        decay = -6 + 6 * (lin + 0.5) ** (1 + rho**0.3) + 0.5 + 2.5 * zigzag
        ranks = lora_ranks(config, dim)

        def linear(scale: float) -> Linear:
            return Linear(dim, dim, axes=("embed", "heads"), init=common.orthogonal(scale), rngs=rngs)

        def vector(x: Any) -> nnx.Param:
            return param(rngs, common.values(x), (dim,), ("heads",))

        self.mu = Shift("rwkvag", spec, rngs=rngs)
        self.r, self.k, self.v = linear(1.0), linear(0.1), linear(1.0)
        self.w_lora = Lora(dim, ranks[0], bias=decay, activation=jnp.tanh, rngs=rngs)
        self.a_lora = Lora(dim, ranks[1], bias=-0.19 + 0.3 * zigzag + 0.4 * lin, rngs=rngs)
        self.v_lora = Lora(dim, ranks[2], bias=0.73 - 0.4 * lin, rngs=rngs)
        self.g_lora = Lora(dim, ranks[3], activation=jax.nn.sigmoid, rngs=rngs)
        self.k_k, self.k_a, self.r_k = vector(0.71 - 0.1 * lin), vector(1.02), vector(-0.04)
        self.norm = common.HeadNorm(config.heads, self.head_dim, gain=common.head_norm_gain(spec), rngs=rngs)
        self.out = Linear(dim, dim, axes=("heads", "embed"), init=constant(0.0), rngs=rngs)

    def mix(
        self, x_BTD: Array, v_first: Array | None, is_first: Array | None, cache: Rwkv7Cache | None
    ) -> tuple[Array, Array, Rwkv7Cache | None]:
        """Output, this layer's own values and the cache; `is_first` [B, T, 1] says to ignore `v_first`."""
        dtype = x_BTD.dtype
        x = self.mu(x_BTD, None if cache is None else cache.last_BD)
        r, k, v = self.r(x["r"]), self.k(x["k"]), self.v(x["v"])
        own_v = v
        if v_first is not None and is_first is not None:
            share = jax.nn.sigmoid(self.v_lora(x["v"]))
            moved = v + (v_first.astype(jnp.float32) - v) * share
            v = jnp.where(is_first, v, moved.astype(dtype))
        log_w = -jnp.exp(-0.5) * jax.nn.sigmoid(self.w_lora(x["w"]))
        eta = jax.nn.sigmoid(self.a_lora(x["a"]))
        gate = self.g_lora(x["g"])
        kappa = self._heads(k.astype(jnp.float32) * self.k_k[...])
        kappa = kappa * jax.lax.rsqrt(jnp.maximum(jnp.sum(kappa * kappa, -1, keepdims=True), 1e-24))
        k = (k * (1 + (eta - 1) * self.k_a[...])).astype(dtype)

        r, k, v, log_w, eta = (self._heads(y) for y in (r, k, v, log_w, eta))
        removed = kappa.astype(dtype)
        result: Any = wkv7(
            r,
            k,
            v,
            log_w,
            -removed,
            (kappa * eta).astype(dtype),
            initial_state=None if cache is None else cache.s_BHKV,
            return_state=True,
            chunk_size=self.config.chunk_size,
        )
        o_BTHV, s_BHKV = result
        bonus = jnp.sum(r.astype(jnp.float32) * k * self._heads(self.r_k[...]), -1, keepdims=True) * v
        y = (self.norm(o_BTHV) + bonus.reshape(x_BTD.shape)) * gate
        if cache is not None:
            cache = Rwkv7Cache(s_BHKV, x_BTD[:, -1].astype(cache.last_BD.dtype))
        return self.out(y.astype(dtype)), own_v, cache

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], self.config.heads, self.head_dim)

    def __call__(self, x_BTD: Array) -> Array:
        """A first layer over a whole sequence."""
        return self.mix(x_BTD, None, None, None)[0]

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Rwkv7Cache:
        """Zeros; `max_len` plays no part."""
        del max_len
        shape = (batch, self.config.heads, self.head_dim, self.head_dim)
        return Rwkv7Cache(jnp.zeros(shape, jnp.float32), jnp.zeros((batch, self.dim), dtype))

    def step(self, x_BD: Array, cache: Any) -> tuple[Array, Any]:
        """One token of a first layer."""
        y_BTD, _, cache = self.mix(x_BD[:, None], None, None, cache)
        return y_BTD[:, 0], cache

    def flops_per_token(self, seq_len: int) -> float:
        """The recurrence: decay, a^T S, two rank-one updates, r^T S; 9 per state entry."""
        del seq_len
        return 9 * self.dim * self.head_dim

    def state_size(self, seq_len: int) -> int:
        """The state and the token before; ChannelMix keeps another."""
        del seq_len
        return self.dim * self.head_dim + self.dim


class Block(common.RwkvBlock):
    """RWKV's block; the first layer's values travel in `carry` under "v_first", beside a count of layers."""

    version = 7

    def init_carry(self, x: Array) -> dict[str, Any]:
        """Zeros; the count has a place per token so that it splits over devices as they do."""
        return {"v_first": jnp.zeros_like(x), "layer": jnp.zeros((*x.shape[:-1], 1), jnp.int32)}

    def mix(self, h_BTD: Array, carry: dict[str, Any], cache: Any) -> tuple[Array, dict[str, Any], Any]:
        """The time mix, the first layer's values, and the layer's cache."""
        is_first = carry["layer"] == 0
        y_BTD, own_v, cache = self.mixer.mix(h_BTD, carry["v_first"], is_first, cache)
        v_first = jnp.where(is_first, own_v.astype(carry["v_first"].dtype), carry["v_first"])
        carry = {**carry, "v_first": v_first, "layer": carry["layer"] + 1}
        return y_BTD, carry, cache
