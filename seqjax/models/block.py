"""The pre-norm block of most architectures, with optional convolutions.

    x += mixer(norm1(x)); x += mlp(norm2(x))

arXiv 2505.18522, Appendix A. Two settings give any mixer the extra parts of recurrent architectures' blocks:

    canon        h + conv(h), causal, depthwise, over 4 tokens, of h = norm1(x) (A), of h = norm2(x) (C), and of gate
                 and up before the MLP's nonlinearity (D); Allen-Zhu, arXiv 2512.17351, facebookresearch/PhysicsLM4
    token_shift  h_t + mu (h_{t-1} - h_t) of the mixer's input, after A, with mu per channel

In channel n of layer l, mu starts at 1 - (n / D)^(1 - l / L), as in RWKV-5, because learning a mu from zero takes much
of a short run. Decoding stores the last inputs of each part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from seqjax.config import ModelConfig
from seqjax.mixers._rwkv import depth, ramp
from seqjax.mixers.base import Block, Carry, MakeMixer, make_mlp, make_norm, segments_of
from seqjax.nn.initializers import values
from seqjax.nn.layers import LayerNorm, RMSNorm, residual_norm
from seqjax.nn.short_conv import Canon, ShortConv, TokenShift, extend, init_cache
from seqjax.sharding import constrain_batch
from seqjax.types import Array, Cache, Layer

# A form of the mixer: maps inputs, carry and cache to outputs, carry and cache.
Mix = Callable[[Array, Carry, Cache], tuple[Array, Carry, Cache]]


class PreNormCache(NamedTuple):
    """The mixer's cache and the last inputs of `canon` and `token_shift`.

    A disabled part has None.
    """

    mixer: Cache
    a_BWD: Array | None = None
    shift_BWD: Array | None = None
    c_BWD: Array | None = None
    d: tuple[Array | None, Array | None] = (None, None)  # [B, W, E] of up and gate


class PreNormBlock(Block):
    """A residual block: norm and mixer, then norm and MLP.

    There is no MLP if `mlp.kind` is none.
    """

    has_switches = resets = True

    def __init__(self, config: ModelConfig, mixer: MakeMixer, layer: Layer, *, rngs: nnx.Rngs):
        super().__init__(config, mixer, layer, rngs=rngs)
        self.norm2 = make_norm(config, rngs=rngs) if config.mlp.kind != "none" else None
        self.mlp = make_mlp(config, layer, rngs=rngs)
        # Drawn last, so the other parameters' initial values do not depend on these settings.
        self.canon_a = Canon(config.dim, rngs=rngs) if "A" in config.canon else None
        self.canon_c = Canon(config.dim, rngs=rngs) if "C" in config.canon else None
        self.token_shift = _token_shift(config, layer, rngs=rngs) if config.token_shift else None
        self.looks_back = config.canon != "none" or config.token_shift

    def _read(
        self, sublayer: int, norm: RMSNorm | LayerNorm, x: Array, carry: Carry, layer: Array, dtype: Any
    ) -> tuple[Array, Array, Carry]:
        """Return the residual stream, the normalised input of a sub-layer, and the carry.

        `sublayer` is 0 for the mixer, 1 for the MLP.
        """
        del sublayer, layer
        return *residual_norm(norm, x, dtype), carry

    def _apply(
        self, mix: Mix, x: Array, carry: Carry, cache: Cache, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to [B, T, D] or [B, D], with `mix` as the mixer's form.

        `cache` is None in training.
        """
        last = cache if isinstance(cache, PreNormCache) else PreNormCache(cache)
        with jax.named_scope("mixer"):  # these names appear in profiles (lab.benchmarks.profile_step)
            x, h, carry = self._read(0, self.norm1, x, carry, layer, dtype)
            h, a_BWD, shift_BWD = self._before_mixer(h, last, **segments_of(carry))
            y, carry, mixer = mix(h, carry, last.mixer)
            x = x + constrain_batch(y).astype(x.dtype)
        c_BWD, d = None, (None, None)
        if self.norm2 is not None and self.mlp is not None:
            with jax.named_scope("mlp"):
                x, h, carry = self._read(1, self.norm2, x, carry, layer, dtype)
                h, c_BWD = _extend(self.canon_c, h, last.c_BWD, **segments_of(carry))
                y, d = self.mlp.extend(h, last.d, **segments_of(carry))
                x = x + constrain_batch(y).astype(x.dtype)
        return x, carry, PreNormCache(mixer, a_BWD, shift_BWD, c_BWD, d) if self.looks_back else mixer

    def _before_mixer(self, h: Array, last: PreNormCache, **segments: Array) -> tuple[Array, Any, Any]:
        h, a_BWD = _extend(self.canon_a, h, last.a_BWD, **segments)
        h, shift_BWD = _extend(self.token_shift, h, last.shift_BWD, **segments)
        return h, a_BWD, shift_BWD

    def mixer_input(self, x: Array, dtype: Any) -> Array:
        """Return the mixer's input for whole sequences [B, T, D]."""
        return self._before_mixer(super().mixer_input(x, dtype), PreNormCache(None))[0]

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Cache:
        """Return the mixer's empty cache.

        With `canon` or `token_shift` it is inside a `PreNormCache`.
        """
        mixer = super().init_cache(batch, max_len, dtype)
        if not self.looks_back:
            return mixer
        a, shift, c = (init_cache(conv, batch, dtype) for conv in (self.canon_a, self.token_shift, self.canon_c))
        return PreNormCache(mixer, a, shift, c, (None, None) if self.mlp is None else self.mlp.init_cache(batch, dtype))

    def __call__(self, x_BTD: Array, carry: Carry, *, layer: Array, dtype: Any) -> tuple[Array, Carry]:
        """Apply the layer to the residual stream [B, T, D]."""
        x_BTD, carry, _ = self._apply(
            lambda h_BTD, carry, _: (*self.apply_mixer(h_BTD, carry), None), x_BTD, carry, None, layer, dtype
        )
        return x_BTD, carry

    def prefill(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to a prompt and fill an empty cache."""
        return self._apply(_decoding(self.mixer.prefill), x_BTD, carry, cache, layer, dtype)

    def prefill_next(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to T tokens that continue the cached sequence."""
        return self._apply(_decoding(self.mixer.prefill_next), x_BTD, carry, cache, layer, dtype)

    def step(self, x_BD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any) -> tuple[Array, Carry, Cache]:
        """Apply the layer to one token."""
        return self._apply(_decoding(self.mixer.step), x_BD, carry, cache, layer, dtype)


def _decoding(form: Callable[[Array, Cache], tuple[Array, Cache]]) -> Mix:
    def mix(h: Array, carry: Carry, cache: Cache) -> tuple[Array, Carry, Cache]:
        y, cache = form(h, cache)
        return y, carry, cache

    return mix


def _extend(conv: ShortConv | None, x: Array, last_BWD: Array | None, **segments: Array) -> tuple[Array, Any]:
    y, last_BWD = extend(conv, x, last_BWD, **segments)
    return y if conv is None else constrain_batch(y), last_BWD


def _token_shift(config: ModelConfig, layer: Layer, *, rngs: nnx.Rngs) -> TokenShift:
    return TokenShift(config.dim, init=values(1 - ramp(config.dim, depth(layer)[1])), rngs=rngs)
