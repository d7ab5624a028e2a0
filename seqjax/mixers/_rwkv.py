"""The shared parts of the RWKV versions: token shift, ChannelMix, norm, block.

    token_shift(x)_t = x_{t-1},  lerp(x; mu) = x + (token_shift(x) - x) * mu
    ChannelMix, v5 and v6:  sigmoid(lerp_r W_r) * (relu(lerp_k W_k)^2 W_v)
    ChannelMix, v7:         relu(lerp_k W_k)^2 W_v
    block:  x += TimeMix(norm1 x);  x += ChannelMix(norm2 x)

Peng et al., arXiv 2404.05892 (v5, v6) and 2503.14456 (v7); public implementation BlinkDL/RWKV-LM. Notation below, for
layer l of L: rho = l / (L - 1), kappa = 1 - l / L, c_n = n / D. RWKV-5's files store 1 - mu.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import kernels_pallas
from kernels_pallas import accumulation_dtype
from seqjax.mixers import base
from seqjax.mixers.base import Carry, MakeMixer, make_norm, segments_of
from seqjax.nn.initializers import Init, constant, orthogonal, values
from seqjax.nn.layers import Linear, residual_norm, save_inputs
from seqjax.nn.params import param
from seqjax.ops.head_norm import head_norm
from seqjax.sharding import constrain_batch, time_pieces
from seqjax.types import Array, Cache, Layer

zeros = constant(0.0)


def depth(layer: Layer) -> tuple[Any, Any]:
    """Return (rho, kappa) of a layer; they are traced if `layer.index` is traced."""
    return layer.index / max(1, layer.n_layers - 1), 1.0 - layer.index / layer.n_layers


def ramp(dim: int, exponent: Any) -> Array:
    """Return (n / D) ** exponent for n = 0 ... D - 1."""
    return (jnp.arange(dim) / dim) ** exponent


def token_shift(x_BTD: Array, last_BD: Array | None = None) -> Array:
    """Return the sequence delayed by one token; `last_BD` (default zero) comes first."""
    first_BD = jnp.zeros_like(x_BTD[:, 0]) if last_BD is None else last_BD.astype(x_BTD.dtype)
    return jnp.concatenate([first_BD[:, None], x_BTD[:, :-1]], axis=1)


def lerps(
    x_BTD: Array,
    last_BD: Array | None,
    mus: tuple[Array, ...],
    moves_NBTD: Array | None = None,
    segments: Array | None = None,
) -> tuple[Array, ...]:
    """Return lerp(x; mu) for each mu [D]; `last_BD` precedes the first token.

    `last_BD` defaults to zero. `moves_NBTD` are added to the mus, per token. With `segments`, int32 [B, T], zero
    precedes each later document.
    """
    # Only XLA passes the last token of a time shard to the device that holds the next shard.
    implementation = "xla" if time_pieces(x_BTD) > 1 else None
    return kernels_pallas.token_shift(x_BTD, last_BD, mus, moves_NBTD, segments=segments, implementation=implementation)


@save_inputs
def squared_relu(x: Array) -> Array:
    """Return relu(x)^2."""
    return jnp.square(jax.nn.relu(x))


@save_inputs
def _sigmoid_gate(gate: Array, y: Array) -> Array:
    return (jax.nn.sigmoid(gate.astype(accumulation_dtype(gate))) * y).astype(y.dtype)


class GroupNorm(nnx.Module):
    """LayerNorm per head with gain and bias per channel, and the output gate.

    This is torch's GroupNorm followed by the gate of `ops.head_norm`.
    """

    def __init__(self, heads: int, head_dim: int, *, gain: Init, eps: float = 64e-5, rngs: nnx.Rngs):
        self.eps = eps
        self.g = param(rngs, gain, (heads * head_dim,), ("heads",))
        self.b = param(rngs, zeros, (heads * head_dim,), ("heads",))

    def __call__(
        self,
        y_BTHV: Array,
        gate_BTD: Array | None,
        skip: tuple[Array, Array] | None = None,
        *,
        activation: str = "none",
    ) -> Array:
        """Map [B, T, H, V] to [B, T, H * V]; gate and skip as in `ops.head_norm`."""
        options: Any = {"gain": self.g[...], "bias": self.b[...], "activation": activation, "eps": self.eps}
        return head_norm(y_BTHV, gate_BTD, skip, **options)


def group_norm_gain(layer: Layer) -> Init:
    """Return the initialiser of the time mix's norm gain: ((1 + l) / L) ** 0.7."""
    return values(((1 + layer.index) / layer.n_layers) ** 0.7)


class ChannelMix(nnx.Module):
    """RWKV's MLP, squared ReLU with token shift; `version` is 5, 6 or 7.

    `inner` is the inner width; None means 3.5 D (v5, v6) or 4 D (v7).
    """

    def __init__(self, dim: int, inner: int | None, layer: Layer, *, version: int, rngs: nnx.Rngs):
        inner = inner or (4 * dim if version == 7 else 7 * dim // 2)
        mu_D = 1 - ramp(dim, depth(layer)[1] ** {5: 1, 6: 3, 7: 4}[version])
        self.mu_k = param(rngs, values(mu_D), (dim,), ("embed",))
        self.k = Linear(dim, inner, axes=("embed", "mlp"), init=orthogonal(), rngs=rngs)
        self.v = Linear(inner, dim, axes=("mlp", "embed"), init=zeros, rngs=rngs)
        gated = version < 7
        self.mu_r = param(rngs, values(mu_D), (dim,), ("embed",)) if gated else None
        self.r = Linear(dim, dim, axes=("embed", None), init=zeros, rngs=rngs) if gated else None

    def __call__(self, x_BTD: Array, last_BD: Array | None = None, segments: Array | None = None) -> Array:
        """Map [B, T, D] to [B, T, D]; `last_BD` and `segments` are as in `lerps`."""
        mus = tuple(mu[...] for mu in (self.mu_k, self.mu_r) if mu is not None)
        k_BTD, *r_BTD = lerps(x_BTD, last_BD, mus, segments=segments)
        y_BTD = self.v(squared_relu(self.k(k_BTD)))
        return y_BTD if self.r is None else _sigmoid_gate(self.r(*r_BTD), y_BTD)


class BlockCache(NamedTuple):
    """The cache of the time mix, and ChannelMix's input at the previous token."""

    mixer: Cache
    last_BD: Array


class RwkvBlock(base.Block):
    """The RWKV block: norm, time mix, norm, ChannelMix.

    A subclass sets `version`. `mlp.kind` has no effect; `mlp.dim` is ChannelMix's inner width. A version with a time
    mix that reads or writes `carry` overrides `init_carry` and `time_mix`.
    """

    version: ClassVar[int]
    resets = True

    def __init__(self, config: Any, mixer: MakeMixer, layer: Layer, *, rngs: nnx.Rngs):
        super().__init__(config, mixer, layer, rngs=rngs)
        self.norm2 = make_norm(config, rngs=rngs)
        self.mlp = ChannelMix(config.dim, config.mlp.dim, layer, version=self.version, rngs=rngs)

    def time_mix(
        self, h_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, continues: bool
    ) -> tuple[Array, Carry, Cache]:
        """Apply the time mix to [B, T, D].

        `cache` is None in training. In decoding it is empty, unless the sequence `continues`.
        """
        del layer
        if cache is None:
            return *self.apply_mixer(h_BTD, carry), None
        y_BTD, cache = (self.mixer.prefill_next if continues else self.mixer.prefill)(h_BTD, cache)
        return y_BTD, carry, cache

    def _apply(
        self,
        x_BTD: Array,
        carry: Carry,
        cache: BlockCache | None,
        *,
        layer: Array,
        dtype: Any,
        continues: bool = False,
    ) -> tuple[Array, Carry, BlockCache | None]:
        mixer_cache, last_BD = (None, None) if cache is None else cache
        with jax.named_scope("mixer"):  # these names appear in profiles (lab.benchmarks.profile_step)
            x_BTD, h_BTD = residual_norm(self.norm1, x_BTD, dtype)
            y_BTD, carry, mixer_cache = self.time_mix(h_BTD, carry, mixer_cache, layer=layer, continues=continues)
            x_BTD = x_BTD + constrain_batch(y_BTD).astype(x_BTD.dtype)
        with jax.named_scope("mlp"):
            x_BTD, h_BTD = residual_norm(self.norm2, x_BTD, dtype)
            x_BTD = x_BTD + constrain_batch(self.mlp(h_BTD, last_BD, **segments_of(carry))).astype(x_BTD.dtype)
        if last_BD is None:
            return x_BTD, carry, None
        return x_BTD, carry, BlockCache(mixer_cache, h_BTD[:, -1].astype(last_BD.dtype))

    def __call__(self, x_BTD: Array, carry: Carry, *, layer: Array, dtype: Any) -> tuple[Array, Carry]:
        """Apply the layer to the residual stream [B, T, D]."""
        x_BTD, carry, _ = self._apply(x_BTD, carry, None, layer=layer, dtype=dtype)
        return x_BTD, carry

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> BlockCache:
        """Return the empty caches of the time mix and of ChannelMix."""
        last_BD = jnp.zeros((batch, self.norm2.g.shape[0]), dtype)
        return BlockCache(self.mixer.init_cache(batch, max_len, dtype), last_BD)

    def prefill(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to a prompt in parallel and fill its cache."""
        return self._apply(x_BTD, carry, cache, layer=layer, dtype=dtype)

    def prefill_next(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer in parallel to T tokens that continue the cached sequence."""
        return self._apply(x_BTD, carry, cache, layer=layer, dtype=dtype, continues=True)

    def step(self, x_BD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any) -> tuple[Array, Carry, Cache]:
        """Apply the layer to one token, as a sequence of length 1.

        The arrays in `carry` have no time axis.
        """
        carry = jax.tree.map(lambda c: c[:, None], carry)
        x_BTD, carry, cache = self.prefill_next(x_BD[:, None], carry, cache, layer=layer, dtype=dtype)
        return x_BTD[:, 0], jax.tree.map(lambda c: c[:, 0], carry), cache
