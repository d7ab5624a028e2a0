"""What the RWKV versions share: token shift, ChannelMix, the norm per head, the initialisers and the block.

    shift(x)_t = x_{t-1},  lerp(x; mu) = x + (shift(x) - x) * mu
    ChannelMix, v5 and v6:  sigmoid(lerp_r W_r) * (relu(lerp_k W_k)^2 W_v)
    ChannelMix, v7:         relu(lerp_k W_k)^2 W_v
    block:  x += TimeMix(ln1 x);  x += ChannelMix(ln2 x)

Peng et al., arXiv 2404.05892 (v5, v6) and 2503.14456 (v7); public implementation BlinkDL/RWKV-LM. Below, for layer l of
L: rho = l / (L - 1), kappa = 1 - l / L, c_n = n / D. RWKV-5's files store 1 - mu.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax import mixers
from seqjax.nn.layers import NORMS, Linear, constant
from seqjax.nn.params import Init, param
from seqjax.types import Array, Cache, LayerSpec

zeros = constant(0.0)


def depth(spec: LayerSpec) -> tuple[Any, Any]:
    """(rho, kappa) of a layer; traced where the layer is."""
    return spec.layer / max(1, spec.n_layers - 1), 1.0 - spec.layer / spec.n_layers


def ramp(dim: int, exponent: Any) -> Array:
    """(n / D) ** exponent, n = 0 ... D - 1."""
    return (jnp.arange(dim) / dim) ** exponent


def values(x: Any) -> Init:
    """Initialiser with the given values."""
    return lambda key, shape, dtype: jnp.broadcast_to(jnp.asarray(x, dtype), shape)


def orthogonal(scale: float = 1.0) -> Init:
    """Orthogonal rows or columns, larger by sqrt(out / in) where the matrix widens.

    Gram-Schmidt, twice per column, on a Gaussian matrix. Not `jax.nn.initializers.orthogonal`: several LAPACK calls of
    one program wait for each other for ever on a CPU with two threads (jax 0.10.2), and a time mix has seven.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        gain = scale * max(1.0, math.sqrt(shape[-1] / shape[-2]))
        long, short = max(shape), min(shape)

        def body(j: Any, q: Array) -> Array:
            done = jnp.where(jnp.arange(short) < j, q, 0)
            column = q[:, j]
            for _ in range(2):
                column = column - exact(done, exact(done.T, column))
            return q.at[:, j].set(column / jnp.linalg.norm(column))

        exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        q = jax.lax.fori_loop(0, short, body, jax.random.normal(key, (long, short), dtype))
        return gain * (q if shape[0] == long else q.T)

    return init


def shift(x_BTD: Array, last_BD: Array | None = None) -> Array:
    """The sequence one token later; `last_BD` (default zero) is what came before its first token."""
    first_BD = jnp.zeros_like(x_BTD[:, 0]) if last_BD is None else last_BD.astype(x_BTD.dtype)
    return jnp.concatenate([first_BD[:, None], x_BTD[:, :-1]], axis=1)


def lerp(x: Array, delta: Array, mu: Any) -> Array:
    """`x` moved by the share `mu` of `delta` = shift(x) - x."""
    return x + delta * mu[...].astype(x.dtype)


class HeadNorm(nnx.Module):
    """LayerNorm over each head of [..., H, V] with one gain and bias per channel, float32 (torch's GroupNorm)."""

    def __init__(self, heads: int, head_dim: int, *, gain: Init, eps: float = 64e-5, rngs: nnx.Rngs):
        self.eps = eps
        self.g = param(rngs, gain, (heads * head_dim,), ("heads",))
        self.b = param(rngs, zeros, (heads * head_dim,), ("heads",))

    def __call__(self, y_BTHV: Array) -> Array:
        """[B, T, H, V] -> float32 [B, T, H * V]."""
        y = y_BTHV.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.reshape(*y.shape[:-2], -1) * self.g[...] + self.b[...]


def head_norm_gain(spec: LayerSpec) -> Init:
    """Gain of the norm after the time mix: ((1 + l) / L) ** 0.7."""
    return values(((1 + spec.layer) / spec.n_layers) ** 0.7)


class ChannelMix(nnx.Module):
    """RWKV's MLP, squared ReLU with token shift; `version` is 5, 6 or 7."""

    def __init__(self, dim: int, inner: int, spec: LayerSpec, *, version: int, rngs: nnx.Rngs):
        inner = inner or (4 * dim if version == 7 else 7 * dim // 2)
        mu = 1 - ramp(dim, depth(spec)[1] ** {5: 1, 6: 3, 7: 4}[version])
        self.mu_k = param(rngs, values(mu), (dim,), ("embed",))
        self.k = Linear(dim, inner, axes=("embed", "mlp"), init=orthogonal(), rngs=rngs)
        self.v = Linear(inner, dim, axes=("mlp", "embed"), init=zeros, rngs=rngs)
        gated = version < 7
        self.mu_r = param(rngs, values(mu), (dim,), ("embed",)) if gated else None
        self.r = Linear(dim, dim, axes=("embed", None), init=zeros, rngs=rngs) if gated else None

    def __call__(self, x_BTD: Array, last_BD: Array | None = None) -> Array:
        """[B, T, D] -> [B, T, D]; `last_BD` is the token before the first."""
        delta = shift(x_BTD, last_BD) - x_BTD
        hidden = jnp.square(jax.nn.relu(self.k(lerp(x_BTD, delta, self.mu_k))))
        y_BTD = self.v(hidden)
        if self.r is None or self.mu_r is None:
            return y_BTD
        return jax.nn.sigmoid(self.r(lerp(x_BTD, delta, self.mu_r))) * y_BTD


class BlockCache(NamedTuple):
    """The time mix's cache and the token before, as ChannelMix sees it."""

    mixer: Cache
    last_BD: Array


class RwkvBlock(nnx.Module):
    """What an RWKV mixer file exports as `Block` (with its `version`): ln1, time mix, ln2, ChannelMix.

    `mlp.kind` plays no part; `mlp.dim` is ChannelMix's inner width, 0 = 3.5 D (v5, v6) or 4 D (v7). A version whose
    time mix reads or writes `carry` overrides `init_carry` and `mix`.
    """

    version: int

    def __init__(self, config: Any, mixer: Any, spec: LayerSpec, *, rngs: nnx.Rngs):
        self.norm1 = NORMS[config.norm](config.dim, eps=config.norm_eps, rngs=rngs)
        self.mixer = mixers.load(mixer.name).Mixer(mixer, spec, rngs=rngs)
        self.norm2 = NORMS[config.norm](config.dim, eps=config.norm_eps, rngs=rngs)
        self.mlp = ChannelMix(config.dim, config.mlp.dim, spec, version=self.version, rngs=rngs)

    def init_carry(self, x: Array) -> dict[str, Any]:
        """Nothing, in most versions."""
        del x
        return {}

    def mix(self, h_BTD: Array, carry: dict[str, Any], cache: Cache) -> tuple[Array, dict[str, Any], Cache]:
        """The time mix over [B, T, D]; `cache` is None in training, else what came before."""
        if cache is None:
            return self.mixer(h_BTD), carry, None
        y_BTD, cache = self.mixer.prefill(h_BTD, cache)
        return y_BTD, carry, cache

    def _both(self, x_BTD: Array, carry: dict[str, Any], cache: BlockCache | None, dtype: Any):
        y_BTD, carry, mixed = self.mix(self.norm1(x_BTD).astype(dtype), carry, None if cache is None else cache.mixer)
        x_BTD = x_BTD + y_BTD.astype(x_BTD.dtype)
        h_BTD = self.norm2(x_BTD).astype(dtype)
        y_BTD = self.mlp(h_BTD, None if cache is None else cache.last_BD)
        new = None if cache is None else BlockCache(mixed, h_BTD[:, -1].astype(cache.last_BD.dtype))
        return x_BTD + y_BTD.astype(x_BTD.dtype), carry, new

    def __call__(self, x_BTD: Array, carry: dict[str, Any], *, dtype: Any) -> tuple[Array, dict[str, Any]]:
        """`dtype` is what is computed in; the residual stream keeps its own."""
        x_BTD, carry, _ = self._both(x_BTD, carry, None, dtype)
        return x_BTD, carry

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> BlockCache:
        """Empty caches of both halves."""
        last_BD = jnp.zeros((batch, self.norm2.g.shape[0]), dtype)
        return BlockCache(self.mixer.init_cache(batch, max_len, dtype), last_BD)

    def prefill(self, x_BTD: Array, carry: dict[str, Any], cache: Any, *, dtype: Any):
        """A prompt, in parallel."""
        return self._both(x_BTD, carry, cache, dtype)

    def step(self, x_BD: Array, carry: dict[str, Any], cache: Any, *, dtype: Any):
        """One token; what `carry` holds has no time axis here."""
        carry = jax.tree.map(lambda c: c[:, None], carry)
        x_BTD, carry, cache = self._both(x_BD[:, None], carry, cache, dtype)
        return x_BTD[:, 0], jax.tree.map(lambda c: c[:, 0], carry), cache

    def flops_per_token(self, seq_len: int) -> float:
        """Forward, beside the products with parameters."""
        return self.mixer.flops_per_token(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, beside the products with parameters."""
        return 3 * self.mixer.flops_per_token(seq_len)

    def state_size(self, seq_len: int) -> int:
        """The time mix's state and one token for ChannelMix."""
        return self.mixer.state_size(seq_len) + self.norm2.g.shape[0]
