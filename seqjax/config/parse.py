"""Convert nested values to frozen dataclasses, including a mixer's settings.

`seqjax.config.settings` defines the settings. This module works for any dataclass, with its defaults and allowed
values. Errors name the full key and the nearest known key. Text is converted by the type of its field.
"""

import ast
import contextlib
import dataclasses
import re
import typing
from typing import Any, TypeVar

from seqjax import mixers
from seqjax.errors import UserError, nearest
from seqjax.fields import alternatives, build, checked, hints_of, is_group, optional

T = TypeVar("T")

# Marks the field with a mixer's settings, or a tuple of them; `name` in each selects its class.
MIXER = "mixer"
BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def is_mixer(hint: Any) -> bool:
    """Return whether a setting holds mixer settings, for one mixer or several."""
    return MIXER in getattr(hint, "__metadata__", ())


# ------------------------------------------------------------------------------------------------- values -> dataclass
def parse(cls: type[T], values: Any, path: str = "config") -> T:
    """Build the dataclass `cls` from a mapping, recursively.

    Raises `UserError` with the full key.
    """
    return build(cls, values, path, _value)


def _value(hint: Any, value: Any, path: str) -> Any:
    if is_mixer(hint):
        if isinstance(value, list | tuple):
            if not value:
                raise UserError(f"{path} is empty; name at least one mixer.{nearest('', mixers.known())}")
            settings = [_mixer(v, f"{path}[{i}]") for i, v in enumerate(value)]
            return tuple(settings) if len(settings) > 1 else settings[0]
        return _mixer(value, path)
    if dataclasses.is_dataclass(hint):
        if not is_group(value):
            raise UserError(f"{path} must be a group of settings, not {value!r}.")
        return parse(typing.cast(type, hint), value, path)
    return checked(hint, value, path)


def _mixer(value: Any, path: str) -> Any:
    name = value.get("name") if is_group(value) else None
    if not isinstance(name, str):
        raise UserError(f"{path}.name must name a mixer.{nearest(str(name), mixers.known())}")
    return parse(mixers.settings_class(name), dict(value.items()) | {"name": mixers.label(name)}, path)


# ------------------------------------------------------------------------------------------------------------- defaults
def complete(cls: Any, values: Any) -> dict[str, Any]:
    """Return `values` with the defaults of the dataclass `cls`, as nested dicts.

    Missing settings without a default and unknown settings are unchanged: `parse` raises an error for both.
    """
    out = dict(values.items())
    for field, hint in zip(dataclasses.fields(cls), hints_of(cls).values(), strict=True):
        value = out.get(field.name)
        if field.name not in out and field.default is not dataclasses.MISSING:
            is_dataclass = dataclasses.is_dataclass(field.default)
            out[field.name] = dataclasses.asdict(typing.cast(Any, field.default)) if is_dataclass else field.default
        elif is_mixer(hint):
            many = isinstance(value, list | tuple)
            out[field.name] = tuple(map(_complete_mixer, value)) if many else _complete_mixer(value)
        elif dataclasses.is_dataclass(hint) and is_group(value):
            out[field.name] = complete(hint, value)
    return out


def _complete_mixer(value: Any) -> Any:
    named = is_group(value) and isinstance(value.get("name"), str)
    return complete(mixers.settings_class(value["name"]), value) if named else value


# ---------------------------------------------------------------------------------------------------- one key at a time
def assign(cls: Any, config: Any, key: str, value: Any) -> None:
    """Set a dotted key in a complete `ConfigDict` of `cls`.

    A text `value` is converted to the field's type. `model.mixer[1].window` belongs to the second mixer.
    `parse` checks types later. Raises `UserError` for a key that does not exist.
    """
    assignment = f"{key}={value}"
    *groups, last = key.split(".")
    node, hint = config, cls
    for i, group in enumerate(groups):
        name, index = _indexed(group)
        if name not in node or not (is_group(node[name]) or isinstance(node[name], tuple)):
            raise UserError(f"{assignment}: there is no group {name!r}.{nearest(name, node.keys())}")
        node, hint = node[name], _hint(hint, node, name)
        node = _one_of(node, index, ".".join(groups[: i + 1]), assignment, ".".join([*groups[i + 1 :], last]))
    name, index = _indexed(last)
    if name not in node or index is not None:
        other_keys = keys_named(config, name)
        hint_text = f" Did you mean {' or '.join(other_keys)}?" if other_keys else ""
        raise UserError(f"{assignment}: there is no setting {last!r}.{hint_text or nearest(name, node.keys())}")
    if isinstance(value, str):
        field_type = _hint(hint, node, name)
        if dataclasses.is_dataclass(field_type):
            example = next(field for field, default in node[name].items() if default is not None)
            raise UserError(
                f"{assignment}: config.{key} must be a group of settings, set one by one, as in {key}.{example}=..."
            )
        value = read(field_type, value)
    # A group inside a tuple is a plain dict, without types to ignore.
    with node.ignore_type() if hasattr(node, "ignore_type") else contextlib.nullcontext():
        node[name] = value


def keys_named(config: Any, name: str, prefix: str = "") -> list[str]:
    """Return the dotted keys of a config that end with `name`."""
    keys = [f"{prefix}{name}"] if name in config and not is_group(config[name]) else []
    for key, value in config.items():
        if is_group(value):
            keys += keys_named(value, name, f"{prefix}{key}.")
    return keys


def _indexed(part: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.*)\[(\d+)\]", part)
    return (match[1], int(match[2])) if match else (part, None)


def _hint(owner: Any, node: Any, name: str) -> Any:
    """Return the type of setting `name` in a group with type `owner`."""
    if name == "name":  # text, even if no mixer has this name
        return str
    if is_mixer(owner):
        owner = mixers.settings_class(node["name"]) if isinstance(node.get("name"), str) else None
    return hints_of(owner).get(name, Any) if dataclasses.is_dataclass(owner) else Any


def _one_of(node: Any, index: int | None, path: str, assignment: str, suffix: str) -> Any:
    """Return the group itself, or the group at `index` if there are several."""
    path = re.sub(r"\[\d+\]$", "", path)
    if not isinstance(node, tuple):
        if index is not None:
            raise UserError(f"{assignment}: there is one {path} here, not several; write {path}.{suffix}.")
        return node
    names = ", ".join(f"{i} {m.get('name') if is_group(m) else m}" for i, m in enumerate(node))
    if index is None or index >= len(node):
        having = [i for i, m in enumerate(node) if is_group(m) and suffix in m] or [len(node) - 1]
        raise UserError(
            f"{assignment}: {path} has {len(node)} here ({names}); choose one: {path}[{having[-1]}].{suffix}."
        )
    return node[index]


def is_list(cls: Any, key: str) -> bool:
    """Return whether a dotted key of the dataclass `cls` is a setting whose value is a list."""
    for part in key.split("."):
        cls = hints_of(cls).get(part) if dataclasses.is_dataclass(cls) else None
    return cls is not None and typing.get_origin(optional(cls)[0]) is tuple


def parts(arg: str) -> list[str]:
    """Split at the commas that are outside brackets."""
    parts, depth = [""], 0
    for c in arg:
        depth = max(0, depth + (c in "([{") - (c in ")]}"))
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def read(hint: Any, text: str) -> Any:
    """Return `text` as a setting's value with type `hint`.

    A list is written `a,b`, with or without brackets and quotes. `parse` checks the result.
    """
    hint, may_be_none = optional(hint)
    if may_be_none and text in ("None", "none"):
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = text
    if typing.get_origin(hint) is tuple:
        return _list(typing.get_args(hint)[0], text, value)
    if hint is str or typing.get_origin(hint) is typing.Literal:
        return value if isinstance(value, str) else text
    if bool in alternatives(hint):
        return BOOLEANS.get(text.lower(), value)
    return value


def _list(element: Any, text: str, value: Any) -> Any:
    """Return the list in `text`, which Python reads as `value`."""
    if element is not str and not isinstance(value, str):
        return value
    if isinstance(value, dict) or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)):
        return value
    text = text.strip()
    inside = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
    return tuple(read(element, part.strip()) for part in parts(inside) if part.strip())
