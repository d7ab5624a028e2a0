"""What the import hook of conftest.py checks annotations with: beartype, an int being a float as PEP 484 has it."""

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
    """The decorator that the hook puts on every function and class: beartype alone where no annotation has a shape.

    What jaxtyping adds to a call, a memory of the sizes so far, takes twenty times as long as the check, and a third
    of the tests that read many settings and results.
    """
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if inspect.isfunction(fn) and not any(map(_may_have_shape, fn.__annotations__.values())):
        return typechecker(fn)
    return _with_shapes(fn, typechecker=typechecker)


jaxtyping.jaxtyped = jaxtyped  # the hook looks it up there
