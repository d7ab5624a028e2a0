"""A mixer by itself, without a model: `seqjax.mixers.Mamba2(dim=256, rngs=nnx.Rngs(0))`.

The classes are made from the files of the mixers: `standalone` derives from a file's `Mixer` a class whose constructor
takes the width and the settings of the file's `Config`, and builds the first layer.
"""

import dataclasses
import functools
import inspect
from typing import Any, ClassVar, cast

from flax import nnx

from seqjax.config_fields import build, hints_of
from seqjax.errors import UserError, nearest
from seqjax.mixers import _registry, base
from seqjax.types import LayerSpec

# The class names of the shipped mixers, and their files.
CLASSES = {
    "BasedConv": "based_conv",
    "BasedLinear": "based_linear",
    "DeltaNet": "deltanet",
    "GatedDeltaNet": "gated_deltanet",
    "Mamba1": "mamba1",
    "Mamba2": "mamba2",
    "RWKV5": "rwkv5",
    "RWKV6": "rwkv6",
    "RWKV7": "rwkv7",
    "RWKV7Shell": "rwkv7_shell",
    "Top1Chunk": "top1_chunk",
    "Top1Element": "top1_element",
    "Transformer": "transformer",
    "TransformerPP": "transformer_pp",
}

ABOUT = """

Stand-alone: x [B, T, D] -> y [B, T, D] in the dtype of x, causal in T, under `jax.jit`, `nnx.jit` and `nnx.grad`.

Args:
    dim: Width of the model, D.
    rngs: Source of the initial values, `nnx.Rngs(seed)`.
    n_layers: Number of layers of the model that this would be the first of; it scales initial values.
    max_len: Number of tokens that position tables and chunks are meant for.
    settings: {settings}.

Raises `UserError` for a setting that does not exist or does not fit the others.
"""


class StandAlone(base.Mixer):
    """A mixer by itself: x [B, T, D] -> y [B, T, D], the first layer of a model of width `dim`.

    `settings` are the fields of the mixer's own `Config`; the class of a mixer lists them (`help`). `n_layers` and
    `max_len`, the number of layers and tokens of the model, affect initial values and position tables.
    """

    definition: ClassVar[_registry.Definition]

    def __init__(self, *, dim: int, rngs: nnx.Rngs, n_layers: int = 1, max_len: int = 2048, **settings: Any):
        for name, size in (("dim", dim), ("n_layers", n_layers), ("max_len", max_len)):
            if size < 1:
                raise UserError(f"{type(self).__name__}: {name} must be at least 1, not {size}.")
        config = self.configure(settings, dim=dim, max_len=max_len)
        make = cast(Any, super().__init__)  # of the mixer, which follows this class
        make(config, LayerSpec(dim, n_layers, 0, max_len), rngs=rngs)

    @classmethod
    def configure(cls, settings: dict[str, Any], *, dim: int, max_len: int) -> Any:
        """Return the mixer's checked `Config`; raise `UserError` in terms of the constructor's arguments."""
        name, config_class, _ = cls.definition
        known = [key for key in hints_of(config_class) if key != "name"]
        for key in settings:
            if key not in known:
                raise UserError(f"{cls.__name__}: {key} is not a setting.{nearest(key, known)}")
        try:
            config = build(config_class, {"name": name, **settings}, "config.model.mixer")
            if hasattr(config, "check"):
                config.check(dim=dim, seq_len=max_len)
        except UserError as error:
            words = str(error).replace("config.model.mixer.", "").replace("config.model.", "")
            raise UserError(f"{cls.__name__}: {words.replace('config.train.seq_len', 'max_len')}") from None
        return config


@functools.cache
def _derive(definition: _registry.Definition, class_name: str) -> type[StandAlone]:
    fields = {field.name: field for field in dataclasses.fields(definition.Config) if field.name != "name"}
    mixer: Any = definition.Mixer

    class Derived(StandAlone, mixer):
        pass

    Derived.definition = definition
    Derived.__name__ = Derived.__qualname__ = class_name
    Derived.__module__ = _registry.PACKAGE
    listed = ", ".join(key if f.default is dataclasses.MISSING else f"{key}={f.default!r}" for key, f in fields.items())
    Derived.__doc__ = f"{inspect.cleandoc(mixer.__doc__ or '')}{ABOUT.format(settings=listed)}"
    # Editors and `help` show every setting with its default, although the constructor takes them as `settings`.
    usual = [
        p for p in inspect.signature(StandAlone.__init__).parameters.values() if p.name not in ("self", "settings")
    ]
    hints = hints_of(definition.Config)
    own = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[key],
        )
        for key, field in fields.items()
    ]
    Derived.__signature__ = inspect.Signature([*usual, *own])
    return Derived


def standalone(name: str) -> type[StandAlone]:
    """Return the class of mixer `name` by itself; of your own, too, registered or in a file named with a dot.

    `standalone("mamba2")` is `seqjax.mixers.Mamba2`. Raises `UserError` for an unknown name.
    """
    definition = _registry.load(name)
    shipped = {file: class_name for class_name, file in CLASSES.items()}
    usual = definition.Mixer.__name__ if definition.Mixer.__name__ != "Mixer" else name.rpartition(".")[2]
    return _derive(definition, shipped.get(name, usual))
