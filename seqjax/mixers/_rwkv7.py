"""LoRAs, token shift, value residual and block of the mixers rwkv7 and rwkv7_shell.

    v += (v_first - v) sigmoid(v0 + (x_v v1) v2)  in every layer except the first, which computes v_first

`rwkv7_shell` puts another mixer's core into these parts. In a hybrid, "first layer" means the model's first layer with
one of the two mixers. Peng et al., arXiv 2503.14456;
public implementation BlinkDL/RWKV-LM, RWKV-v7.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import kernels_pallas
from seqjax.mixers import base
from seqjax.mixers._rwkv import RwkvBlock, depth, lerps, ramp
from seqjax.mixers.base import Carry, MakeMixer, segments_of
from seqjax.nn.initializers import constant, orthogonal, values
from seqjax.nn.layers import save_inputs
from seqjax.nn.params import param
from seqjax.types import Array, Layer


def rank(dim: int, factor: float, power: float) -> int:
    """Return the published rank for a model width.

    It is factor * dim ** power, rounded to a multiple of 32, at least 32.
    """
    return max(32, 32 * round(factor * dim**power / 32))


def value_rank(dim: int) -> int:
    """Return the published rank of the value residual."""
    return rank(dim, 1.3, 0.5)


def gate_rank(dim: int) -> int:
    """Return the published rank of the output gate."""
    return rank(dim, 0.6, 0.8)


class Lora(nnx.Module):
    """bias + act(x A) B; A starts as zero, B as a tenth of an orthogonal matrix."""

    def __init__(self, dim: int, n_rank: int, *, bias: Any = None, activation: Any = None, rngs: nnx.Rngs):
        self.activation = activation
        self.a = param(rngs, constant(0.0), (dim, n_rank), ("embed", "rank"))
        self.b = param(rngs, orthogonal(0.1), (n_rank, dim), ("rank", "heads"))
        self.bias = None if bias is None else param(rngs, values(bias), (dim,), ("heads",))

    def __call__(self, x: Array, *, dtype: Any = jnp.float32) -> Array:
        """Map [..., D] to [..., D]; the product has `dtype`, and a float32 bias makes the result float32.

        The default is float32, because most results enter a sigmoid.
        """
        y = jnp.matmul(self.hidden(x), self.b[...].astype(x.dtype), preferred_element_type=dtype)
        return y if self.bias is None else y + self.bias[...]

    def hidden(self, x: Array) -> Array:
        """Return act(x A)."""
        hidden = x @ self.a[...].astype(x.dtype)
        return hidden if self.activation is None else self.activation(hidden)

    def factors(self, x_BTD: Array) -> kernels_pallas.LowRank:
        """Return the map's factors, for a kernel that computes the map itself.

        The map must have a bias.
        """
        assert self.bias is not None
        return kernels_pallas.LowRank(self.hidden(x_BTD), self.b[...], self.bias[...])


class ValueResidual(Lora):
    """The value residual: v + (v_first - v) sigmoid(v0 + (x_v v1) v2).

    `v_first`, the first layer's values, reaches later layers through the block's `carry`. The first layer has
    the parameters but does not use them, because all layers share one structure.
    """

    def __init__(self, dim: int, n_rank: int, *, rngs: nnx.Rngs):
        super().__init__(dim, n_rank, bias=0.73 - 0.4 * centred(dim), rngs=rngs)

    def mix(self, x_BTD: Array, v_BTD: Array, v_first_BTD: Array, layer: Array | int) -> Array:
        """Return the values of `layer`, mixed with the first layer's values.

        The mixing ratio is computed from `x_BTD`, the shifted input x_v.
        """

        @save_inputs
        def mixed(score_BTD: Array, v_BTD: Array, v_first_BTD: Array) -> Array:
            ratio_BTD = jax.nn.sigmoid(score_BTD)
            return (v_BTD + (v_first_BTD.astype(jnp.float32) - v_BTD) * ratio_BTD).astype(v_BTD.dtype)

        return jnp.where(layer == 0, v_BTD, mixed(self(x_BTD), v_BTD, v_first_BTD))


def first_values(v_BTD: Array, v_first_BTD: Array | None, layer: Array | int) -> Array:
    """Return the first layer's values: `v_first_BTD`, or this layer's if it is first."""
    return v_BTD if v_first_BTD is None else jnp.where(layer == 0, v_BTD.astype(v_first_BTD.dtype), v_first_BTD)


class TokenShift(nnx.Module):
    """x_t + mu (x_{t-1} - x_t), one mu per name and channel.

    In channel n of layer l, mu starts as 1 - (n / D) ** (power * (1 - l / L)).
    """

    def __init__(self, names: str, dim: int, layer: Layer, *, rngs: nnx.Rngs):
        self.names = names
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        for name in names:
            mu_D = 1 - ramp(dim, powers[name] * depth(layer)[1])
            setattr(self, name, param(rngs, values(mu_D), (dim,), ("embed",)))

    def __call__(self, x_BTD: Array, last_BD: Array | None, segments: Array | None = None) -> dict[str, Array]:
        """Return the interpolations [B, T, D] with the previous token, by name.

        `last_BD` precedes the first token; `segments` is as in `lerps`.
        """
        mus = tuple(getattr(self, name)[...] for name in self.names)
        return dict(zip(self.names, lerps(x_BTD, last_BD, mus, segments=segments), strict=True))


def centred(dim: int) -> Array:
    """Return a ramp from -1/2 to 1/2 over the channels."""
    return jnp.arange(dim) / max(1, dim - 1) - 0.5


class TimeMix(base.Mixer):
    """A time mix that receives the first layer's values.

    Outside a model it acts as a first layer.
    """

    @abc.abstractmethod
    def time_mix(
        self,
        x_BTD: Array,
        cache: Any,
        *,
        v_first_BTD: Array | None = None,
        layer: Array | int = 0,
        continues: bool = False,
        **segments: Any,
    ) -> tuple[Array, Array, Any]:
        """Return the output, the first layer's values [B, T, D], and the cache.

        The next layer receives the first layer's values. `cache` is None in training; in decoding it comes from
        `init_cache`, unless the sequence `continues`. `layer` counts from the first layer with an RWKV-7 block. Without
        `v_first_BTD` this is the first layer. A mixer that `resets` accepts `segments`.
        """

    def __call__(self, x_BTD: Array, **segments: Any) -> Array:
        """Apply a first layer to a whole sequence."""
        return self.time_mix(x_BTD, None, **segments)[0]

    def prefill(self, x_BTD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply a first layer to a prompt and fill its cache."""
        y_BTD, _, cache = self.time_mix(x_BTD, cache)
        return y_BTD, cache

    def prefill_next(self, x_BTD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply a first layer to T tokens that continue the cached sequence."""
        y_BTD, _, cache = self.time_mix(x_BTD, cache, continues=True)
        return y_BTD, cache

    def step(self, x_BD: Array, cache: Any) -> tuple[Array, Any]:
        """Apply a first layer to one token."""
        y_BTD, cache = self.prefill_next(x_BD[:, None], cache)
        return y_BTD[:, 0], cache


class Block(RwkvBlock):
    """The RWKV-7 block; `carry["v_first"]` holds the first layer's values.

    The first layer is the model's first layer with such a block.
    """

    version = 7
    mixer: TimeMix

    def __init__(self, config: Any, mixer: MakeMixer, layer: Layer, *, rngs: nnx.Rngs):
        super().__init__(config, mixer, layer, rngs=rngs)
        self.first = layer.first

    def init_carry(self, x: Array) -> Carry:
        """Return zeros as placeholders for the first layer's values."""
        return {"v_first": jnp.zeros_like(x)}

    def time_mix(
        self, h_BTD: Array, carry: Carry, cache: Any, *, layer: Array, continues: bool
    ) -> tuple[Array, Carry, Any]:
        """Apply the time mix and store the first layer's values in `carry`."""
        options: Any = {"v_first_BTD": carry["v_first"], "layer": layer - self.first, "continues": continues}
        y_BTD, v_first_BTD, cache = self.mixer.time_mix(h_BTD, cache, **options | segments_of(carry))
        return y_BTD, {**carry, "v_first": v_first_BTD.astype(carry["v_first"].dtype)}, cache
