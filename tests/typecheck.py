"""The type checker for conftest.py's import hook: beartype, with int accepted as float (PEP 484)."""

import functools
import inspect
import typing

import jaxtyping
from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_with_shapes = jaxtyping.jaxtyped


def _may_have_shape(hint) -> bool:
    if isinstance(hint, str) or getattr(hint, "__module__", "").startswith("jaxtyping"):
        return True
    return any(map(_may_have_shape, typing.get_args(hint)))


def jaxtyped(fn=None, *, typechecker):
    """Decorate a function or class; use plain beartype if no annotation has a shape.

    jaxtyping's record of sizes takes twenty times as long as the check itself: a third of the time of tests that read
    many settings and results.
    """
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if inspect.isfunction(fn) and not any(map(_may_have_shape, fn.__annotations__.values())):
        return typechecker(fn)
    return _with_shapes(fn, typechecker=typechecker)


jaxtyping.jaxtyped = jaxtyped  # the hook reads this attribute
