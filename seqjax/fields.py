"""Check values against a frozen dataclass: keys, types, bounds, allowed values."""

import contextlib
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from seqjax.errors import UserError, nearest

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The bounds in a setting's `Annotated` type: `low` inclusive, `high` exclusive."""

    low: float
    high: float = math.inf

    def check(self, value: Any, path: str, *, may_be_none: bool) -> None:
        """Raise `UserError`, naming the setting `path`, for a value outside the bounds.

        None is valid here.
        """
        if value is None or self.low <= value < self.high:
            return
        known = [f"at least {self.low}"] * (self.low > -math.inf) + [f"less than {self.high}"] * (self.high < math.inf)
        known += ["finite"] * (self.high == math.inf and not math.isfinite(value))
        raise UserError(f"{path} must be {' and '.join(known)}{', or None' * may_be_none}, not {value}.")


def plain(hint: Any) -> Any:
    """Return a type without its annotations."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


@functools.cache  # typing resolves hints anew at each call: half the time to read a config
def hints_of(cls: Any) -> Mapping[str, Any]:
    """Return the types of a dataclass's settings, by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return types.MappingProxyType({field.name: hints[field.name] for field in dataclasses.fields(cls)})


def is_group(value: Any) -> bool:
    """Return whether `value` is a group of settings: a dict or a `ConfigDict`."""
    return isinstance(value, Mapping) or hasattr(value, "items")


def optional(hint: Any) -> tuple[Any, bool]:
    """Return the plain type without None, and whether None was an alternative.

    The plain type is a union if several alternatives remain.
    """
    hint = plain(hint)
    if not _is_union(hint):
        return hint, False
    options = typing.get_args(hint)
    return typing.Union[tuple(o for o in options if o is not type(None))], type(None) in options  # noqa: UP007


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union without None; a tuple of one for another type."""
    hint = optional(hint)[0]
    return typing.get_args(hint) if _is_union(hint) else (hint,)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def checked(hint: Any, value: Any, path: str) -> Any:
    """Return `value` as a setting of type `hint`.

    Raises `UserError`, naming the setting `path`, if the value does not fit.
    """
    if typing.get_origin(hint) is Annotated:
        kind, *bounds = typing.get_args(hint)
        value = checked(kind, value, path)
        for bound in bounds:
            bound.check(value, path, may_be_none=optional(kind)[1])
        return value
    hint, may_be_none = optional(hint)
    if hint is Any or (value is None and may_be_none):  # A user's mixer may have settings without a type.
        return value
    if _is_union(hint):
        return _checked_alternative(alternatives(hint), value, path, may_be_none=may_be_none)
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            fix = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
            raise UserError(f"{path} must be a list, not {value!r}; write {fix}.")
        element = typing.get_args(hint)[0]
        return tuple(checked(element, v, f"{path}[{i}]") for i, v in enumerate(typing.cast(Any, value)))
    if origin is typing.Literal:
        known = typing.get_args(hint)
        if not isinstance(value, str) or value not in known:
            also = " None leaves the choice to seqjax." if may_be_none else ""
            raise UserError(f"{path}={value!r} is not known.{nearest(str(value), known)}{also}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        kind = hint.__name__ + (" or None" if may_be_none else "")
        whole = f" Write {value:.0f}." if hint is int and isinstance(value, float) and value.is_integer() else ""
        raise UserError(f"{path} must be {kind}, not {type(value).__name__} {value!r}.{whole}")
    return value


def _checked_alternative(hints: tuple[Any, ...], value: Any, path: str, *, may_be_none: bool) -> Any:
    """Return `value` as a setting of the first type that it fits."""
    for hint in hints:
        with contextlib.suppress(UserError):
            return checked(hint, value, path)
    known = [name for hint in hints for name in typing.get_args(hint) or (hint.__name__,)] + [None] * may_be_none
    raise UserError(f"{path} must be {' or '.join(map(str, known))}, not {value!r}.")


def build(cls: type[T], values: Any, path: str, check: Callable[[Any, Any, str], Any] = checked) -> T:
    """Return the dataclass `cls` built from a mapping.

    Each value passes through `check(type, value, its full key)`.
    """
    hints, items = hints_of(cls), dict(values.items())
    for key in items:
        if key not in hints:
            raise UserError(f"{path}.{key} is not a setting.{nearest(str(key), hints)}")
    kwargs = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        if field.name in items:
            kwargs[field.name] = check(hints[field.name], items[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{path}.{field.name} is missing; it has no default, so set it.")
    return cls(**kwargs)
