"""The contract of a mixer and of the block around it.

A mixer is a class that derives from `Mixer`. It must define a parallel form, an empty cache and a recurrent form, and
may override the rest (docs/add_a_mixer.md). A block is one layer of the model. Most mixers use the pre-norm block of
seqjax/models/block.py; an architecture whose block differs derives its own from `Block` and names it in `Mixer.block`.

Beside the residual stream, a block can pass arrays to later blocks in a dict, the `carry` (RWKV-7: the values of the
first layer). Its initial value is the union of what the blocks' `init_carry` return; a block returns all of it, changed
or not.
"""

import abc
import contextvars
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError, nearest
from seqjax.fields import checked
from seqjax.nn.layers import NORMS, LayerNorm, RMSNorm, residual_norm
from seqjax.types import Array, Cache, Layer, require_array

Carry = dict[str, Any]


# The methods that take an input, and its name and axes.
_FORMS = dict.fromkeys(("__call__", "prefill", "prefill_next"), ("x_BTD", "B, T, D")) | {"step": ("x_BD", "B, D")}


def _with_checked_input(method: Callable[..., Any], name: str, axes: str) -> Callable[..., Any]:
    """Return a method of a mixer that checks the shape and dtype of its input before it computes anything."""

    @functools.wraps(method)
    def with_checked_input(self: Any, *args: Any, **named: Any) -> Any:
        if args or name in named:  # otherwise Python says what is missing
            require_array(name, args[0] if args else named[name], axes, last=self._width)
        return method(self, *args, **named)

    return with_checked_input


class Mixer(nnx.Module):
    """A causal sequence mixer, parallel over time in training and recurrent, one token at a time, in decoding.

    A subclass is built alone as in a model: `MyMixer(dim, expand=2, rngs=nnx.Rngs(0))`. The keyword arguments of its
    constructor are the settings that a config may name; `layer`, optional, is the `Layer` it is built for. Their types
    and allowed values (`Literal`) are checked, and a wrong one is a `UserError` that begins with its name. An input of
    a wrong shape or dtype is a `ValueError` or `TypeError` that begins with the name of the argument.
    """

    _width: int | None = None  # of the inputs, `dim`; None without a constructor

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in _FORMS.keys() & cls.__dict__.keys():
            setattr(cls, name, _with_checked_input(cls.__dict__[name], *_FORMS[name]))
        if "__init__" in cls.__dict__:
            cls.__init__ = _checked(cls.__init__)
            # Without this, `help` and notebooks show the (*args, **kwargs) of nnx's metaclass.
            cls.__signature__ = inspect.Signature(list(inspect.signature(cls.__init__).parameters.values())[1:])

    # The block of this architecture; None means the model's pre-norm block.
    block: ClassVar[type["Block"] | None] = None
    __signature__: ClassVar[inspect.Signature]

    @abc.abstractmethod
    def __call__(self, x_BTD: Array) -> Array:
        """Apply the parallel form: [B, T, D] to [B, T, D], causal in T, for any T >= 1."""

    @abc.abstractmethod
    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Cache:
        """Return an empty cache for `max_len` tokens: an array or a NamedTuple of arrays, with the batch axis first."""

    @abc.abstractmethod
    def step(self, x_BD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the recurrent form to one token; it equals the parallel form over the tokens seen so far."""

    def check_length(self, seq_len: int) -> None:
        """Raise `UserError` where the settings do not fit training on `seq_len` tokens; by default all of them do."""
        del seq_len

    def prefill(self, x_BTD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the mixer to a prompt [B, T, D] and fill an empty cache; by default token by token."""
        return self.prefill_next(x_BTD, cache)

    def prefill_next(self, x_BTD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the mixer to T tokens after those that `cache` has seen, if any; by default token by token."""

        def body(cache: Cache, x_BD: Array) -> tuple[Cache, Array]:
            y_BD, cache = self.step(x_BD, cache)
            return cache, y_BD

        cache, y_TBD = jax.lax.scan(body, cache, jnp.moveaxis(x_BTD, 1, 0))
        return jnp.moveaxis(y_TBD, 0, 1), cache

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token, excluding the products with parameters.

        They are averaged over a causal sequence of `seq_len` tokens and count only what the mask, window or selection
        requires. The default, 0, is right for a mixer that consists of products with parameters.
        """
        del seq_len
        return 0.0

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the same for forward and backward: three times the forward, unless a part has no gradient."""
        return 3 * self.flops_per_token(seq_len)

    def state_size(self, seq_len: int) -> int:
        """Return the number of elements per sequence in a cache for `seq_len` tokens, without scalars."""
        return _cache_elements(self, seq_len)

    def entropy(self, x_BTD: Array) -> Array | None:
        """Return the entropy of each query's weights over the past in nats, float32 [B, T, H]; None without weights."""
        del x_BTD
        return None

    def queries_and_keys(self, x_BTD: Array) -> tuple[Array, Array] | None:
        """Return the queries [B, T, H, K] and keys [B, T, G, K] that are scored with each other; None without them.

        The batch size is 1 where they are a position table, the same for all sequences.
        """
        del x_BTD
        return None

    @property
    def longest(self) -> int:
        """The maximum sequence length in tokens, if there is a position table; 0 means no limit."""
        return 0


class RecurrentMixer(Mixer):
    """A mixer that continues from any cache: a subclass defines `init_cache`, and `step` or `prefill`.

    With `step` alone, all forms follow from it token by token. They are right and slow: training takes T steps one
    after another. With `prefill`, the parallel form from any cache, all forms follow from that.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if cls.step is RecurrentMixer.step and cls.prefill is RecurrentMixer.prefill:
            raise UserError(f"{cls.__name__} derives from RecurrentMixer and must define step or prefill.")

    def prefill(self, x_BTD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the parallel form after the tokens that `cache` has seen; by default token by token."""
        return super().prefill_next(x_BTD, cache)

    def prefill_next(self, x_BTD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the parallel form after the tokens that `cache` has seen."""
        return self.prefill(x_BTD, cache)

    def __call__(self, x_BTD: Array) -> Array:
        """Apply the parallel form from an empty cache."""
        return self.prefill(x_BTD, self.init_cache(x_BTD.shape[0], x_BTD.shape[1], x_BTD.dtype))[0]

    def step(self, x_BD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the recurrent form to one token; by default the parallel form to a sequence of one token."""
        y_BTD, cache = self.prefill(x_BD[:, None], cache)
        return y_BTD[:, 0], cache


# Builds the mixer of a block when called with `rngs=`. The block calls it after building the first norm, so that the
# order of random keys is fixed.
MakeMixer = Callable[..., Mixer]


class Block(nnx.Module):
    """One layer of the model: a mixer and the norms, MLP and residual connections around it.

    `layer` is the 0-based index of the layer, an int32 scalar that may be traced, because one program may serve all
    layers. `dtype` is the dtype in which the mixer and the MLP compute; the residual stream keeps its own.
    """

    # Whether the block has the model's settings `canon` and `token_shift`, as those derived from the pre-norm block do.
    has_switches: ClassVar[bool] = False

    def __init__(self, config: Any, mixer: MakeMixer, layer: Layer, *, rngs: nnx.Rngs):
        """Build the block of `layer`; `config` is the model's (`seqjax.config.settings.ModelConfig`)."""
        del layer
        self.norm1 = make_norm(config, rngs=rngs)
        self.mixer = mixer(rngs=rngs)

    def init_carry(self, x: Array) -> Carry:
        """Return this block's part of the initial `carry`, given the embeddings [B, T, D] or [B, D]; usually empty."""
        del x
        return {}

    @abc.abstractmethod
    def __call__(self, x_BTD: Array, carry: Carry, *, layer: Array, dtype: Any) -> tuple[Array, Carry]:
        """Apply the layer to the residual stream [B, T, D]."""

    @abc.abstractmethod
    def prefill(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to a prompt and fill an empty cache."""

    def prefill_next(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to T tokens after those that `cache` has seen, if any; by default token by token.

        The default is for arrays in `carry` that have the time on axis 1.
        """

        def body(cache: Cache, inputs: tuple[Array, Carry]) -> tuple[Cache, tuple[Array, Carry]]:
            x_BD, carry, cache = self.step(*inputs, cache, layer=layer, dtype=dtype)
            return cache, (x_BD, carry)

        time_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (x_BTD, carry))
        cache, outputs = jax.lax.scan(body, cache, time_first)
        x_BTD, carry = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
        return x_BTD, carry, cache

    @abc.abstractmethod
    def step(self, x_BD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any) -> tuple[Array, Carry, Cache]:
        """Apply the layer to one token."""

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Cache:
        """Return an empty cache for `prefill` and `step`."""
        return self.mixer.init_cache(batch, max_len, dtype)

    def entropy(self, x_BTD: Array, *, dtype: Any) -> Array | None:
        """Return the entropy of the mixer's weights in nats, float32 [B, T, H]; None if it has none."""
        return self.mixer.entropy(self.mixer_input(x_BTD, dtype))

    def mixer_input(self, x: Array, dtype: Any) -> Array:
        """Return the normalised residual stream [B, T, D] or [B, D], split over devices along the batch alone."""
        return residual_norm(self.norm1, x, dtype)[1]

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token, excluding the products with parameters."""
        return self.mixer.flops_per_token(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the forward and backward FLOPs per token, excluding the products with parameters."""
        return self.mixer.train_flops_per_token(seq_len)

    def state_size(self, seq_len: int) -> int:
        """Return the number of elements per sequence in a cache for `seq_len` tokens, without scalars."""
        return _cache_elements(self, seq_len)

    @property
    def longest(self) -> int:
        """The maximum sequence length in tokens; 0 means no limit."""
        return self.mixer.longest


def make_norm(config: Any, *, rngs: nnx.Rngs) -> RMSNorm | LayerNorm:
    """Return a norm over the model's width, of the kind that the model's config selects."""
    return NORMS[config.norm](config.dim, eps=config.norm_eps, rngs=rngs)


# The keys by which errors call sizes that a mixer is given: {} where a mixer is built alone.
KEYS: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("KEYS")


def size(**value: int) -> str:
    """Return `dim=64` for an error about settings, or `config.model.dim=64` where a config is checked."""
    ((name, number),) = value.items()
    return f"{KEYS.get({}).get(name, name)}={number}"


def at_least(low: int, **sizes: int | None) -> None:
    """Raise `UserError` for a setting below `low`; None, which means not set, is valid."""
    for name, value in sizes.items():
        if value is not None and value < low:
            raise UserError(f"{name} must be at least {low}, not {value}.")


def divided(heads: int, **widths: int) -> None:
    """Raise `UserError` for a width of all heads together that `heads` does not divide."""
    for name, width in widths.items():
        if width < 1 or width % heads:
            raise UserError(
                f"heads={heads} does not divide the width {width} of its {name}; choose heads that do, or set {name}."
            )


@functools.cache
def settings_of(init: Callable[..., None]) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default (or `inspect.Parameter.empty`) of every setting of a mixer's constructor."""
    hints = typing.get_type_hints(inspect.unwrap(init))
    parameters = inspect.signature(init).parameters.values()
    own = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("layer", "rngs")]
    return {p.name: (hints.get(p.name, Any), p.default) for p in own}


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """Return a mixer's constructor that checks the types of its settings before anything is made."""

    @functools.wraps(init)
    def checked_init(self: Mixer, *args: Any, **settings: Any) -> None:
        known = settings_of(init)
        for name, value in settings.items():
            if name in known:
                settings[name] = checked(known[name][0], value, name)
            elif name not in ("dim", "layer", "rngs"):
                raise UserError(f"{name} is not a setting of {type(self).__name__}.{nearest(name, known)}")
        for name, (_, default) in known.items():
            if default is inspect.Parameter.empty and name not in settings:
                raise UserError(f"{name} is missing; it has no default, so give it.")
        dim = settings["dim"] if "dim" in settings else args[0] if args else 1
        at_least(1, dim=checked(int, dim, "dim"))
        init(self, *args, **settings)
        self._width = dim

    return checked_init


def _cache_elements(owner: Mixer | Block, seq_len: int) -> int:
    cache = jax.eval_shape(lambda: owner.init_cache(1, seq_len, jnp.float32))
    return sum(x.size for x in jax.tree.leaves(cache) if x.ndim)
