"""Chooses the implementation of an op.

An op has a tuple of `Backend`s, each declared beside its kernels: `refusal(problem)` says why it cannot run a problem
(None when it can), `load()` imports the kernels. Nothing of a backend is imported before it has accepted, so a machine
without CUDA never imports a GPU library. A caller that names a backend gets that one or a `BackendError` with the
reason of every refusal: there is no silent fallback.

docs/add_a_kernel_backend.md describes how to add one.
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
    """The selected implementation cannot run this problem; the message lists each backend's reason."""


class Problem(NamedTuple):
    """A problem as a backend sees it before it accepts: the platform, the operands, and the op's static options."""

    platform: str  # "cpu", "gpu", "tpu"
    operands: tuple[jax.ShapeDtypeStruct, ...]
    options: Mapping[str, Any]
    is_named: bool = False  # whether the caller selected this backend by name


def no_refusal(problem: Problem) -> str | None:
    """Accept every problem: XLA compiles plain array code for every device."""
    del problem


def no_preference(problem: Problem) -> bool:
    """Keep the usual order."""
    del problem
    return False


@dataclass(frozen=True)
class Backend(Generic[Kernels]):
    """An implementation of an op, as its own file declares it."""

    name: str  # of IMPLEMENTATIONS or the op's own order, or another one for a backend from outside this package
    load: Callable[[], Kernels]  # imports the kernels
    refusal: Callable[[Problem], str | None] = no_refusal  # why it cannot run the problem
    leads: Callable[[Problem], bool] = no_preference  # whether it is tried first, where it was measured faster


# Backends of other packages, by op and name (outside.py).
_outside: dict[str, dict[str, Backend[Any]]] = {}
_used: dict[str, str] = {}
_logged: set[tuple[str, str]] = set()


def add_outside(op: str, backend: Backend[Any]) -> None:
    """Let `pick` try a backend of another package first; it replaces any of the same name."""
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
    """Return the kernels that run this problem: those of the named backend, or of the first that accepts.

    Backends from outside this package are tried first, then those that lead for this problem, then the others in
    `order`, which lists the valid names of an op's backends.

    Raises BackendError when the named one is unknown or refuses, with the reason of each backend.
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
        asked = problem._replace(is_named=implementation == name)
        reason = f"{op} has no {name} kernel" if backend is None else backend.refusal(asked)
        if reason is None and backend is not None and implementation in (None, name):
            _record(op, name)
            return backend.load()
        refusals[name] = reason or "can run this"
    wanted = f"implementation={implementation!r}" if implementation else "any implementation"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise BackendError(f"{op} cannot run with {wanted} on {problem.platform}. {reasons}.")


def used() -> dict[str, str]:
    """Return {op: backend} of everything that was traced so far in this process, the latest choice per op."""
    return dict(_used)


def _record(op: str, name: str) -> None:
    _used[op] = name
    if (op, name) not in _logged:
        _logged.add((op, name))
        log.info("%s runs on %s", op, name)
