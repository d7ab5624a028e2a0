"""Sequence mixers, one per file with a frozen `Config` and a `Mixer` that derives from base.Mixer."""

import importlib
import pkgutil
from types import ModuleType

from seqjax.errors import UserError, nearest
from seqjax.mixers import base


def names() -> list[str]:
    """Return the file names, without suffix, of the mixers that ship with seqjax.

    base.py is the contract, and a leading underscore marks a file of shared code.
    """
    files = {module.name for module in pkgutil.iter_modules(__path__)} - {"base"}
    return sorted(name for name in files if not name.startswith("_"))


def load(name: str) -> ModuleType:
    """Return the module of mixer `name`; a dotted name is imported as given, so that a notebook can add its own."""
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
    if not issubclass(module.Mixer, base.Mixer):
        raise UserError(
            f"config.model.mixer.name={name!r}: the Mixer of {module.__file__} must derive from "
            "seqjax.mixers.base.Mixer (docs/add_a_mixer.md)."
        )
    return module
