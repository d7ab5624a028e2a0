"""Choose the backend that runs an op.

Each op has a tuple of `Backend`s, declared next to their kernels. `refusal(problem)` returns the reason why a backend
cannot run a problem, or None. `load()` imports the kernels, and runs only after the backend has accepted. A machine
without CUDA therefore never imports a GPU library. A caller that selects a backend by name gets it, or a `BackendError`
with every backend's reason: there is no silent fallback.

docs/add_a_kernel_backend.md describes how to add a backend.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from kernels_pallas import device

log = logging.getLogger("kernels_pallas")

IMPLEMENTATIONS = ("triton", "pallas", "xla")

Kernels = TypeVar("Kernels")


class BackendError(ValueError):
    """The selected implementation cannot run this problem.

    The message lists each backend's reason.
    """


class Problem(NamedTuple):
    """The facts by which a backend accepts or refuses.

    They are the platform, the operands' shapes and dtypes, and the op's static options.
    """

    platform: str  # "cpu", "gpu", "tpu"
    operands: tuple[jax.ShapeDtypeStruct, ...]
    options: Mapping[str, Any]
    is_named: bool = False  # True if the caller selected this backend by name


def no_refusal(problem: Problem) -> str | None:
    """Accept every problem: XLA compiles plain array code for every device."""
    del problem


def no_preference(problem: Problem) -> bool:
    """Return False: keep the op's usual backend order."""
    del problem
    return False


@dataclass(frozen=True)
class Backend(Generic[Kernels]):
    """One implementation of an op."""

    name: str  # from IMPLEMENTATIONS or the op's `order`; any new name for a backend from another package
    load: Callable[[], Kernels]  # imports the kernels
    refusal: Callable[[Problem], str | None] = no_refusal  # reason why it cannot run, or None
    leads: Callable[[Problem], bool] = no_preference  # True where measurements show it is faster: it is tried first


# Backends from other packages, by op and name (outside.py).
_outside: dict[str, dict[str, Backend[Any]]] = {}
_used: dict[str, str] = {}
_logged: set[tuple[str, str]] = set()


def add_outside(op: str, backend: Backend[Any]) -> None:
    """Register a backend from another package.

    `pick` tries it first. It replaces a backend with the same name.
    """
    _outside.setdefault(op, {})[backend.name] = backend


def pick(
    op: str,
    backends: Sequence[Backend[Kernels]],
    implementation: str | None,
    operands: tuple,
    options: Mapping[str, Any],
    *,
    order: Sequence[str] = IMPLEMENTATIONS,
) -> Kernels:
    """Return the kernels of the selected backend, or of the first that accepts.

    The order is: backends from other packages, then backends that lead for this problem, then the rest in `order`.
    `order` also lists the op's valid backend names.

    Raises BackendError, with each backend's reason, if the name is unknown or the backend refuses.
    """
    outside: Mapping[str, Backend[Any]] = _outside.get(op, {})
    known = (*outside, *order)
    if implementation is not None and implementation not in known:
        raise BackendError(f"unknown implementation {implementation!r} for {op}: None, {', '.join(known)}")
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    problem = Problem(device.platform(), shapes, options)
    by_name, refusals = {backend.name: backend for backend in backends}, {}
    own = sorted(order, key=lambda name: name not in by_name or not by_name[name].leads(problem))
    by_name |= outside
    for name in (*outside, *own):
        backend = by_name.get(name)
        named_problem = problem._replace(is_named=implementation == name)
        reason = f"{op} has no {name} kernel" if backend is None else backend.refusal(named_problem)
        if reason is None and backend is not None and implementation in (None, name):
            _record(op, name)
            return backend.load()
        refusals[name] = reason or "can run this"
    requested = f"implementation={implementation!r}" if implementation else "any implementation"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise BackendError(f"{op} cannot run with {requested} on {problem.platform}. {reasons}.")


def used() -> dict[str, str]:
    """Return {op: backend}, the latest choice for each op traced in this process."""
    return dict(_used)


def _record(op: str, name: str) -> None:
    _used[op] = name
    if (op, name) not in _logged:
        _logged.add((op, name))
        log.info("%s runs on %s", op, name)
