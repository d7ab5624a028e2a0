"""The contract of a mixer and of the block around it.

A mixer is a class that derives from `Mixer`. It must define a parallel form, an empty cache and a recurrent form, and
may override the rest (docs/add_a_mixer.md). A block is one layer of the model. Most mixers use the pre-norm block in
seqjax/models/block.py. An architecture with a different block derives a class from `Block` and sets it as
`Mixer.block`.

In addition to the residual stream, blocks can pass arrays to later blocks in a dict, the `carry` (RWKV-7: the first
layer's values). The initial carry is the union of the blocks' `init_carry` results. Every block returns the complete
carry, changed or not. In training the carry also sums the layers' auxiliary losses (`Mixer.call_with_loss`).
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
from seqjax.nn.initializers import GPT_INIT, residual_init
from seqjax.nn.layers import NORMS, LayerNorm, Mlp, RMSNorm, residual_norm
from seqjax.types import Array, Cache, Layer, require_array

Carry = dict[str, Any]
# The entry of `carry` that sums the layers' auxiliary losses, float32 []. Evaluation and decoding have no such entry.
AUXILIARY_LOSS = "auxiliary_loss"
# The entry of `carry` with the number of each token's document, int32 [B, T], in a model that resets at documents
# (config.data.reset). Decoding has no such entry: a cache holds one document.
SEGMENTS = "segments"


# The methods that take an input, and its name and axes.
_OF_SEQUENCES = "__call__", "call_with_loss", "prefill", "prefill_next"
_FORMS = dict.fromkeys(_OF_SEQUENCES, ("x_BTD", "B, T, D")) | {"step": ("x_BD", "B, D")}


def _with_checked_input(method: Callable[..., Any], name: str, axes: str) -> Callable[..., Any]:
    """Return a method of a mixer that checks the shape and dtype of its input before it computes anything."""

    @functools.wraps(method)
    def with_checked_input(self: Any, *args: Any, **named: Any) -> Any:
        if args or name in named:  # otherwise Python says what is missing
            require_array(name, args[0] if args else named[name], axes, last=self._width)
        return method(self, *args, **named)

    return with_checked_input


class Mixer(nnx.Module):
    """A causal sequence mixer: parallel over time in training, recurrent in decoding.

    A subclass can be built outside a model: `MyMixer(dim, expand=2, rngs=nnx.Rngs(0))`. The constructor's keyword
    arguments are the settings that a config may use; the optional `layer` is the mixer's place in the model (`Layer`).
    Types and allowed values (`Literal`) are checked; an invalid setting raises a `UserError` that begins with the
    setting's name.
    An input with a wrong shape or dtype raises a `ValueError` or `TypeError` that begins with the argument's name.
    """

    _width: int | None = None  # of the inputs, `dim`; None without a constructor

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.resets = cls.__dict__.get("resets", False)
        for name in _FORMS.keys() & cls.__dict__.keys():
            setattr(cls, name, _with_checked_input(cls.__dict__[name], *_FORMS[name]))
        if "__init__" in cls.__dict__:
            cls.__init__ = _checked(cls.__init__)
            # Otherwise `help` and notebooks show (*args, **kwargs) from nnx's metaclass.
            cls.__signature__ = inspect.Signature(list(inspect.signature(cls.__init__).parameters.values())[1:])

    # The block of this architecture; None means the model's pre-norm block.
    block: ClassVar[type["Block"] | None] = None
    # Whether `__call__` (and `call_with_loss`) accepts `segments`, int32 [B, T], the number of each token's document.
    # No output and no gradient of a document may then depend on another document, and positions restart. Subclasses do
    # not inherit it, because they may mix tokens in other parts.
    resets: ClassVar[bool] = False
    # A mixer with the same parameters except for the group `auxiliary`; `--init_from` accepts its runs.
    extends: ClassVar[str | None] = None
    __signature__: ClassVar[inspect.Signature]

    @abc.abstractmethod
    def __call__(self, x_BTD: Array) -> Array:
        """Apply the parallel form: [B, T, D] to [B, T, D], causal in T, for any T >= 1."""

    def call_with_loss(self, x_BTD: Array) -> tuple[Array, Array]:
        """Apply the parallel form in training; return its output and an auxiliary loss.

        A mixer with a second loss overrides it. The loss is a float32 scalar, a mean over tokens. The optimiser
        minimises the sum over layers together with the language loss, and evaluation calls `__call__` instead. Only
        parameters of the group `auxiliary` (`seqjax.nn.auxiliary`) may receive gradients from the loss, and these
        parameters may receive no other gradient: apply `jax.lax.stop_gradient` to the other inputs of the loss.
        """
        raise NotImplementedError(f"{type(self).__name__} has no auxiliary loss.")

    @property
    def has_loss(self) -> bool:
        """Whether the mixer has an auxiliary loss."""
        return type(self).call_with_loss is not Mixer.call_with_loss

    @abc.abstractmethod
    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Cache:
        """Return an empty cache for `max_len` tokens.

        A cache is an array or a NamedTuple of arrays, with the batch axis first. `Model.grow_cache` copies the arrays
        of a full cache to the start of a longer empty cache. Therefore a longer cache has the same arrays with equal or
        longer axes, and each token's entry has the same index in both.
        """

    @abc.abstractmethod
    def step(self, x_BD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the recurrent form to one token.

        The result equals the parallel form over the tokens seen so far.
        """

    def check_length(self, seq_len: int) -> None:
        """Raise `UserError` if the settings do not fit training on `seq_len` tokens.

        The default accepts any length.
        """
        del seq_len

    def prefill(self, x_BTD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the mixer to a prompt [B, T, D] and fill an empty cache.

        The default runs token by token.
        """
        return self.prefill_next(x_BTD, cache)

    def prefill_next(self, x_BTD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the mixer to T tokens that continue the cached sequence.

        The cache may be empty. The default runs token by token.
        """

        def body(cache: Cache, x_BD: Array) -> tuple[Cache, Array]:
            y_BD, cache = self.step(x_BD, cache)
            return cache, y_BD

        cache, y_TBD = jax.lax.scan(body, cache, jnp.moveaxis(x_BTD, 1, 0))
        return jnp.moveaxis(y_TBD, 0, 1), cache

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token, excluding products with parameters.

        This is an average over a causal sequence of `seq_len` tokens. It counts only the work that the mask, window or
        selection requires. The default, 0, is right for a mixer that consists of products with parameters.
        """
        del seq_len
        return 0.0

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the forward and backward FLOPs, excluding products with parameters.

        The default is three times the forward FLOPs. Override it if a part has no gradient.
        """
        return 3 * self.flops_per_token(seq_len)

    def state_size(self, seq_len: int) -> int:
        """Return the number of cache elements per sequence of `seq_len` tokens.

        Scalars are not counted.
        """
        return _cache_elements(self, seq_len)

    def entropy(self, x_BTD: Array) -> Array | None:
        """Return the entropy of each query's weights in nats, float32 [B, T, H].

        None if the mixer has no weights over the past.
        """
        del x_BTD
        return None

    def queries_and_keys(self, x_BTD: Array) -> tuple[Array, Array] | None:
        """Return the queries [B, T, H, K] and keys [B, T, G, K] of the scores.

        None if the mixer has none. The batch size is 1 for a position table, which all sequences share.
        """
        del x_BTD
        return None

    @property
    def longest(self) -> int:
        """The longest sequence in tokens, set by a position table; 0 means no limit."""
        return 0


class RecurrentMixer(Mixer):
    """A mixer that continues from any cache.

    A subclass defines `init_cache` and either `step` or `prefill`. With only `step`, all forms run token by token:
    correct but slow, because training takes T sequential steps. With `prefill`, the parallel form from any cache, all
    forms use `prefill`.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if cls.step is RecurrentMixer.step and cls.prefill is RecurrentMixer.prefill:
            raise UserError(f"{cls.__name__} derives from RecurrentMixer and must define step or prefill.")

    def prefill(self, x_BTD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the parallel form to tokens that continue the cached sequence.

        The default runs token by token.
        """
        return super().prefill_next(x_BTD, cache)

    def prefill_next(self, x_BTD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        return self.prefill(x_BTD, cache)

    def __call__(self, x_BTD: Array, **segments: Array) -> Array:
        """Apply the parallel form from an empty cache.

        A mixer that `resets` accepts `segments` in `prefill`.
        """
        return self.prefill(x_BTD, self.init_cache(x_BTD.shape[0], x_BTD.shape[1], x_BTD.dtype), **segments)[0]

    def step(self, x_BD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Apply the recurrent form to one token.

        The default applies the parallel form to a sequence of one token.
        """
        y_BTD, cache = self.prefill(x_BD[:, None], cache)
        return y_BTD[:, 0], cache


# Builds a block's mixer when called with `rngs=`. The block calls it after building the first norm, which fixes the
# order of the random keys.
MakeMixer = Callable[..., Mixer]


class Block(nnx.Module):
    """One layer of the model: a mixer with its norms, MLP and residual connections.

    `layer` is the 0-based layer index, an int32 scalar that may be traced, because one program may serve all layers.
    `dtype` is the compute dtype of mixer and MLP; the residual stream has a separate dtype.
    """

    # Whether the block supports the model's settings `canon` and `token_shift`; blocks derived from the pre-norm block
    # do.
    has_switches: ClassVar[bool] = False
    # Whether the block keeps packed documents apart: it passes `carry[SEGMENTS]` to every part that mixes tokens.
    resets: ClassVar[bool] = False

    def __init__(self, config: Any, mixer: MakeMixer, layer: Layer, *, rngs: nnx.Rngs):
        """Build the block of `layer`.

        `config` is the model's config (`seqjax.config.settings.ModelConfig`).
        """
        del layer
        self.norm1 = make_norm(config, rngs=rngs)
        self.mixer = mixer(rngs=rngs)

    def init_carry(self, x: Array) -> Carry:
        """Return this block's part of the initial `carry`; usually empty.

        `x` are the embeddings, [B, T, D] or [B, D].
        """
        del x
        return {}

    @abc.abstractmethod
    def __call__(self, x_BTD: Array, carry: Carry, *, layer: Array, dtype: Any) -> tuple[Array, Carry]:
        """Apply the layer to the residual stream [B, T, D]."""

    def apply_mixer(self, h_BTD: Array, carry: Carry) -> tuple[Array, Carry]:
        """Apply the mixer's parallel form, and in training add its auxiliary loss to `carry`.

        Raises `UserError` if the loss is not a float32 scalar.
        """
        if AUXILIARY_LOSS not in carry or not self.mixer.has_loss:
            return self.mixer(h_BTD, **segments_of(carry)), carry
        y_BTD, loss = self.mixer.call_with_loss(h_BTD, **segments_of(carry))
        if jnp.shape(loss) != () or jnp.result_type(loss) != jnp.float32:
            raise UserError(
                f"The auxiliary loss of {type(self.mixer).__name__} is {jnp.result_type(loss)}{[*jnp.shape(loss)]} "
                "instead of a float32 scalar; return its mean over tokens from call_with_loss."
            )
        return y_BTD, {**carry, AUXILIARY_LOSS: carry[AUXILIARY_LOSS] + loss}

    @abc.abstractmethod
    def prefill(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to a prompt and fill an empty cache."""

    def prefill_next(
        self, x_BTD: Array, carry: Carry, cache: Cache, *, layer: Array, dtype: Any
    ) -> tuple[Array, Carry, Cache]:
        """Apply the layer to T tokens that continue the cached sequence.

        The cache may be empty. The default runs token by token and requires that the arrays in `carry` have time on
        axis 1.
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

    def input_of(self, x: Array, carry: Carry, *, layer: Array) -> Array:
        """Return the input of the block's first norm; usually the residual stream `x`."""
        del carry, layer
        return x

    def entropy(self, x_BTD: Array, *, dtype: Any) -> Array | None:
        """Return the entropy of the mixer's weights in nats, float32 [B, T, H], or None.

        `x_BTD` is the result of `input_of`.
        """
        return self.mixer.entropy(self.mixer_input(x_BTD, dtype))

    def mixer_input(self, x: Array, dtype: Any) -> Array:
        """Return the mixer's input, [B, T, D] or [B, D], for the result `x` of `input_of`.

        It is sharded over the batch only.
        """
        return residual_norm(self.norm1, x, dtype)[1]

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token, excluding products with parameters."""
        return self.mixer.flops_per_token(seq_len)

    def train_flops_per_token(self, seq_len: int) -> float:
        """Return the forward and backward FLOPs, excluding products with parameters."""
        return self.mixer.train_flops_per_token(seq_len)

    def state_size(self, seq_len: int) -> int:
        """Return the number of cache elements per sequence of `seq_len` tokens.

        Scalars are not counted.
        """
        return _cache_elements(self, seq_len)

    @property
    def longest(self) -> int:
        """The longest sequence in tokens; 0 means no limit."""
        return self.mixer.longest


def segments_of(carry: Carry) -> dict[str, Array]:
    """Return the keyword argument `segments` of packed documents; empty without a reset."""
    return {SEGMENTS: carry[SEGMENTS]} if SEGMENTS in carry else {}


def make_norm(config: Any, *, rngs: nnx.Rngs) -> RMSNorm | LayerNorm:
    """Return a norm over the model width, of the kind set in the model's config."""
    return NORMS[config.norm](config.dim, eps=config.norm_eps, rngs=rngs)


def make_mlp(config: Any, layer: Layer, *, rngs: nnx.Rngs) -> Mlp | None:
    """Return the MLP set in the model's config; None if `mlp.kind` is none."""
    if config.mlp.kind == "none":
        return None
    return Mlp(
        config.dim,
        config.mlp.dim or default_mlp_dim(config),
        kind=config.mlp.kind,
        down_init=residual_init(layer.n_layers) if config.mlp.rescale_init else GPT_INIT,
        bias=config.mlp.bias,
        approximate_gelu=config.mlp.approximate_gelu,
        canon="D" in config.canon,
        rngs=rngs,
    )


def default_mlp_dim(config: Any) -> int:
    """Return the default inner width: 4 D for a plain MLP, 8/3 D for a gated MLP.

    Both have the same cost.
    """
    return 4 * config.dim if config.mlp.kind == "gelu" else 8 * config.dim // 3


# Config keys that errors use for the mixer's sizes; {} outside a model.
KEYS: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("KEYS")


def size(**value: int) -> str:
    """Return "dim=64", or "config.model.dim=64" while a config is checked.

    Errors about settings use it.
    """
    ((name, number),) = value.items()
    return f"{KEYS.get({}).get(name, name)}={number}"


def at_least(low: int, **sizes: int | None) -> None:
    """Raise `UserError` for a setting below `low`; None (not set) is valid."""
    for name, value in sizes.items():
        if value is not None and value < low:
            raise UserError(f"{name} must be at least {low}, not {value}.")


def divided(heads: int, **widths: int) -> None:
    """Raise `UserError` if `heads` does not divide a width summed over heads."""
    for name, width in widths.items():
        if width < 1 or width % heads:
            raise UserError(
                f"heads={heads} does not divide the width {width} of its {name}; choose heads that do, or set {name}."
            )


@functools.cache
def settings_of(init: Callable[..., None]) -> dict[str, tuple[Any, Any]]:
    """Return each setting of a mixer's constructor with its type and default.

    A setting without a default has `inspect.Parameter.empty`.
    """
    hints = typing.get_type_hints(inspect.unwrap(init))
    parameters = inspect.signature(init).parameters.values()
    own = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in ("layer", "rngs")]
    return {p.name: (hints.get(p.name, Any), p.default) for p in own}


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """Return a mixer's constructor with a type check of its settings before any work."""

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
                raise UserError(f"{name} is missing; it has no default, so set it.")
        dim = settings["dim"] if "dim" in settings else args[0] if args else 1
        at_least(1, dim=checked(int, dim, "dim"))
        init(self, *args, **settings)
        self._width = dim

    return checked_init


def _cache_elements(owner: Mixer | Block, seq_len: int) -> int:
    cache = jax.eval_shape(lambda: owner.init_cache(1, seq_len, jnp.float32))
    return sum(x.size for x in jax.tree.leaves(cache) if x.ndim)
