"""Mixers by name: the files of this package, a file named with a dot, or a class that was registered."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flax import nnx

from seqjax.mixers import base
from seqjax.nn.params import Template
from seqjax.types import Layer
from seqjax.utils import UserError, find_in_current_directory, nearest

M = TypeVar("M")
PACKAGE = "seqjax.mixers"

_registered: dict[str, type[base.Mixer]] = {}


def names() -> list[str]:
    """Return the file names, without suffix, of the mixers that ship with seqjax.

    base.py is the contract, and a leading underscore marks a file of shared code.
    """
    directory = Path(__file__).parent
    return list(_names_in(directory, directory.stat().st_mtime_ns))


@functools.lru_cache(maxsize=1)  # every reading of a config asks; a new file changes the time of its directory
def _names_in(directory: Path, changed: int) -> tuple[str, ...]:
    del changed
    files = {module.name for module in pkgutil.iter_modules([str(directory)])} - {"base"}
    return tuple(sorted(name for name in files if not name.startswith("_")))


def known() -> list[str]:
    """Return the names that need no dot: those of shipped and of registered mixers."""
    return sorted({*names(), *_registered})


def is_foreign(name: str) -> bool:
    """Return whether loading mixer `name` imports a file from outside seqjax."""
    return "." in name and not name.startswith(f"{PACKAGE}.")


# ---------------------------------------------------------------------------------------------------- names and classes
def register(name: str) -> Callable[[M], M]:
    """Return a decorator that makes a class the mixer `name` of this process.

        @seqjax.mixers.register("ema")
        class Ema(seqjax.mixers.base.Mixer):
            def __init__(self, dim, *, expand=2, rngs):
            ...

    A config then selects it with `mixer={"name": "ema"}`. Another class of that name, as when a notebook's cell runs
    again, replaces it. Raises `UserError` for a name that cannot be used and a class that breaks the contract.
    """
    if name in names() or not name.isidentifier():
        taken = "belongs to a mixer that ships with seqjax" if name in names() else "is not a Python identifier"
        raise UserError(f"A mixer cannot be registered as {name!r}, which {taken}; choose another name.")

    def decorate(mixer: M) -> M:
        _registered[name] = _checked(mixer, f"The class registered as {name!r}")
        return mixer

    return decorate


def load(name: str) -> type[base.Mixer]:
    """Return the class of mixer `name`: registered, or of a shipped file or, with a dot, of a file imported by it."""
    if name in _registered:
        return _registered[name]
    where = f"config.model.mixer.name={name!r}"
    if "." not in name and name not in names():
        raise UserError(
            f"{where} is not a mixer. One of your own is registered first, or its file is named with a dot "
            f"(docs/add_a_mixer.md).{nearest(name, known())}"
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{where} is not the name of a Python module; write package.module.")
    if is_foreign(name):
        find_in_current_directory()
    try:
        module = importlib.import_module(name if "." in name else f"{PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise UserError(
                f"{where}: no module {error.name!r} to import. It must be installed, or lie in the directory in which "
                "the command runs."
            ) from error
        raise
    found = _mixers_of(module)
    if len(found) != 1:
        which = ", ".join(mixer.__name__ for mixer in found) or "none"
        raise UserError(
            f"{where}: {module.__file__} must define one class that derives from seqjax.mixers.base.Mixer, not {which} "
            "(docs/add_a_mixer.md); the name of one that is only a base begins with an underscore."
        )
    return _checked(found[0], f"{where}: {found[0].__name__} of {module.__file__}")


def name_of(mixer: type[base.Mixer]) -> str:
    """Return the name by which a config selects a class, which is registered or the only mixer of its file."""
    for name, registered in _registered.items():
        if registered is mixer:
            return name
    module = sys.modules.get(getattr(mixer, "__module__", ""))
    if module is not None and _mixers_of(module) == [mixer]:
        return module.__name__.removeprefix(f"{PACKAGE}.")
    name = getattr(mixer, "__name__", repr(mixer))
    raise UserError(
        f"{name} has no name that a config could select it by: put @seqjax.mixers.register('a_name') above the class, "
        "or write it into a file of its own (docs/add_a_mixer.md)."
    )


def class_named(name: str) -> type[base.Mixer] | None:
    """Return the shipped class `name`, whose file has its name in lower case, with or without underscores."""
    file = {file.replace("_", ""): file for file in names()}.get(name.lower())
    mixer = None if file is None else load(file)
    return mixer if mixer is not None and mixer.__name__ == name else None


def _mixers_of(module: ModuleType) -> list[type[base.Mixer]]:
    own = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
    return [x for x in own if issubclass(x, base.Mixer) and not x.__name__.startswith("_")]


def _checked(mixer: Any, who: str) -> type[base.Mixer]:
    if not (isinstance(mixer, type) and issubclass(mixer, base.Mixer)):
        raise UserError(f"{who} must derive from seqjax.mixers.base.Mixer (docs/add_a_mixer.md).")
    parameters = inspect.signature(mixer.__init__).parameters
    if list(parameters)[:2] != ["self", "dim"] or "rngs" not in parameters or "name" in parameters:
        raise UserError(
            f"{who} needs a constructor `def __init__(self, dim, *, SETTINGS, rngs)`, whose settings are not called "
            "name (docs/add_a_mixer.md)."
        )
    return mixer


# ------------------------------------------------------------------------------------------------- settings of a config
def settings_class(name: str) -> Any:
    """Return the frozen dataclass of a config's group `model.mixer`: `name`, and the settings of the constructor."""
    return _settings_class(load(name))


@functools.cache
def _settings_class(mixer: type[base.Mixer]) -> Any:
    fields: list[Any] = [("name", str)]
    for key, (hint, default) in base.settings_of(mixer.__init__).items():
        required = default is inspect.Parameter.empty
        fields.append((key, hint) if required else (key, hint, dataclasses.field(default=default)))
    return dataclasses.make_dataclass(f"{mixer.__name__}Settings", fields, frozen=True, kw_only=True)


def build(settings: Any, dim: int, *, layer: Layer, rngs: nnx.Rngs) -> base.Mixer:
    """Return the mixer that a config's group `settings` describes, at model width `dim`, for one layer."""
    mixer: Any = load(settings.name)
    own = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings) if field.name != "name"}
    if "layer" in inspect.signature(mixer.__init__).parameters:
        own["layer"] = layer
    return mixer(dim, **own, rngs=rngs)


def check(settings: Any, *, dim: int, n_layers: int, seq_len: int) -> None:
    """Raise `UserError` where the settings of a config do not fit each other or the model; no array is made."""
    layer = Layer(n_layers=n_layers, max_len=seq_len)
    try:
        _check(settings, load(settings.name), dim, layer)
    except UserError as error:
        text = re.sub(r"(?<!\w)dim=", "config.model.dim=", str(error)).replace("max_len=", "config.train.seq_len=")
        raise UserError(f"config.model.mixer.{text}") from error


@functools.lru_cache(maxsize=512)
def _check(settings: Any, mixer: type[base.Mixer], dim: int, layer: Layer) -> None:
    del mixer  # part of the key: a registered class may have been replaced
    template = Template(lambda rngs, index: build(settings, dim, layer=layer._replace(index=index), rngs=rngs))
    template.bind(template.shapes).check_length(layer.max_len)
