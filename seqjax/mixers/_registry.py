"""Mixers by name: the files of this package, a file named with a dot, or a class that was registered."""

import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from seqjax.errors import UserError, nearest
from seqjax.mixers import base

M = TypeVar("M")
PACKAGE = "seqjax.mixers"


class Definition(NamedTuple):
    """A mixer: the name by which a config selects it, the dataclass of its settings, and its class."""

    name: str
    Config: Any
    Mixer: Any


_registered: dict[str, Definition] = {}


def names() -> list[str]:
    """Return the file names, without suffix, of the mixers that ship with seqjax.

    base.py is the contract, and a leading underscore marks a file of shared code.
    """
    files = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])} - {"base"}
    return sorted(name for name in files if not name.startswith("_"))


def known() -> list[str]:
    """Return the names that need no dot: those of the shipped mixers and of the registered ones."""
    return sorted({*names(), *_registered})


def is_foreign(name: str) -> bool:
    """Return whether loading mixer `name` imports a file from outside seqjax."""
    return "." in name and not name.startswith(f"{PACKAGE}.")


def register(name: str) -> Callable[[M], M]:
    """Return a decorator that makes a class, with the `Config` inside it, the mixer `name` of this process.

        @seqjax.mixers.register("ema")
        class Ema(seqjax.mixers.base.Mixer):
            @dataclasses.dataclass(frozen=True, kw_only=True)
            class Config:
                name: str
                expand: int = 2
            ...

    A config then selects it with `mixer={"name": "ema"}`. Another class of that name, as when a notebook's cell runs
    again, replaces it. Raises `UserError` for a name that cannot be used and a class that breaks the contract.
    """
    if name in names() or not name.isidentifier():
        taken = "belongs to a mixer that ships with seqjax" if name in names() else "is not a Python identifier"
        raise UserError(f"A mixer cannot be registered as {name!r}, which {taken}; choose another name.")

    def decorate(mixer: M) -> M:
        config = getattr(mixer, "Config", None)
        _check(config, mixer, f"The class registered as {name!r}", "give it a class Config of its own, inside")
        _registered[name] = Definition(name, config, mixer)
        return mixer

    return decorate


def load(name: str) -> Definition:
    """Return mixer `name`: a registered class, a shipped file or, if it has a dot, a file imported by that name."""
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
    try:
        module = importlib.import_module(name if "." in name else f"{PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise UserError(
                f"{where}: no module {error.name!r} to import. It must be installed, or lie in the directory in which "
                "the command runs."
            ) from error
        raise
    for member in ("Config", "Mixer"):
        if not hasattr(module, member):
            raise UserError(f"{where}: {module.__file__} does not define {member}.")
    _check(module.Config, module.Mixer, f"{where}: the Mixer of {module.__file__}", "define the dataclass Config")
    return Definition(name, module.Config, module.Mixer)


def definition_of(mixer: Any) -> Definition:
    """Return the definition of a mixer's class, which is registered or the `Mixer` of its file."""
    for definition in _registered.values():
        if definition.Mixer is mixer:
            return definition
    module = getattr(mixer, "__module__", "")
    if getattr(sys.modules.get(module), "Mixer", None) is mixer:
        return load(module.removeprefix(f"{PACKAGE}."))
    name = getattr(mixer, "__name__", repr(mixer))
    raise UserError(
        f"{name} has no name that a config could select it by: put @seqjax.mixers.register('a_name') above the class, "
        "or call it Mixer in a file of its own (docs/add_a_mixer.md)."
    )


def _check(config: Any, mixer: Any, who: str, fix: str) -> None:
    if not (isinstance(mixer, type) and issubclass(mixer, base.Mixer)):
        raise UserError(f"{who} must derive from seqjax.mixers.base.Mixer (docs/add_a_mixer.md).")
    if not dataclasses.is_dataclass(config) or "name" not in {field.name for field in dataclasses.fields(config)}:
        raise UserError(f"{who} has no settings: {fix}, a frozen dataclass with `name: str` (docs/add_a_mixer.md).")
