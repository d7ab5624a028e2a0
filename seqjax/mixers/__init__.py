"""Sequence mixers, one file each: a frozen `Config` and an `nnx.Module` called `Mixer` (see docs/add_a_mixer.md)."""

import importlib
import pkgutil
from types import ModuleType

from seqjax.errors import UserError, nearest


def names() -> list[str]:
    """The mixers that ship with seqjax, by file name. A leading underscore marks a file that only helps others."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def load(name: str) -> ModuleType:
    """The module of mixer `name`; a dotted name is imported as given, so a notebook can bring its own."""
    if "." not in name and name not in names():
        raise UserError(f"config.model.mixer.name={name!r} is not a mixer.{nearest(name, names())}")
    try:
        module = importlib.import_module(name if "." in name else f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise UserError(f"config.model.mixer.name={name!r}: no module {error.name!r} to import.") from error
        raise
    for member in ("Config", "Mixer"):
        if not hasattr(module, member):
            raise UserError(f"config.model.mixer.name={name!r}: {module.__file__} does not define {member}.")
    return module
