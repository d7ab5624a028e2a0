"""The list of all settings in `seqjax train --help`, read from the dataclasses that define them."""

import dataclasses
import inspect
import re
import types
import typing
from typing import Any

from seqjax import mixers
from seqjax.config import Config
from seqjax.config_fields import hints_of
from seqjax.config_parse import is_mixer

KINDS = {int: "INT", float: "FLOAT", str: "TEXT", bool: "True|False"}
WIDTH = 54


def text() -> str:
    """Return every setting with its type or allowed values, its default and what its comment says."""
    lines = [
        "settings, as --config.KEY=VALUE or as key=value after the config's name; in parentheses the default where",
        "neither the config nor its size sets one:",
        "",
        *_lines(Config, ""),
    ]
    for name in mixers.names():
        lines += ["", f"  settings of the mixer {name} (--config.model.mixer.KEY):", ""]
        lines += _lines(mixers.settings_class(name), "model.mixer.", source=mixers.load(name).__init__)
    return "\n".join(lines)


def kind_of(hint: Any) -> str:
    """Return the type of a setting for a reader: INT, TEXT, a|b|c, (TEXT, ...), "INT or None"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("None" if arg is type(None) else kind_of(arg) for arg in args)
    if origin is typing.Literal:
        return "|".join(map(str, args))
    if origin is tuple:
        return f"({kind_of(args[0])}, ...)"
    return KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def _lines(cls: Any, prefix: str, *, source: Any = None) -> list[str]:
    comments = _comments(source or cls)
    lines = []
    for field, hint in zip(dataclasses.fields(cls), hints_of(cls).values(), strict=True):
        key = f"{prefix}{field.name}"
        if is_mixer(hint):
            lines.append(f"  --config.{key}.name={'|'.join(mixers.names())}")
        elif dataclasses.is_dataclass(hint):
            lines += _lines(hint, f"{key}.")
        elif (prefix, field.name) != ("model.mixer.", "name"):
            required = field.default is dataclasses.MISSING
            default = "(no default)" if required else f"({field.default!r})" if field.default != "" else "('')"
            left = f"  --config.{key}={kind_of(hint)}"
            lines.append(f"{left:<{WIDTH}} {default}  {comments.get(field.name, '')}".rstrip())
    return lines


def _comments(source: Any) -> dict[str, str]:
    """Return the comments at the end of the lines that define a dataclass's fields, or the arguments of a function."""
    try:
        text = inspect.getsource(source)
    except (OSError, TypeError):  # made in a shell
        return {}
    return dict(re.findall(r"^ +(\w+): [^#\n]*  # (.*)$", text, re.M))
