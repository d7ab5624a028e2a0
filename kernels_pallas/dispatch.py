"""Which implementation of an op runs.

Every op has a table of backends in order of preference. A backend is a pair: `probe(problem)` says why it
cannot run the problem (None when it can), `load()` imports it. Nothing of a backend is imported before its
probe has accepted, so a machine without CUDA never imports a GPU library. A caller that names a backend gets
that one or a `BackendError` with the reason of every refusal: there is no silent fallback.

To add one: write its module and `register` it here with a probe (docs/kernels.md, "Adding a backend").
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from kernels_pallas import checks

log = logging.getLogger("kernels_pallas")

IMPLEMENTATIONS = ("triton", "pallas", "xla")

# Tokens per sequence from which exact selection in Mosaic GPU is faster than in Triton, on an H200: 19.3 against 20.7
# ms at 102,400, 0.126 against 0.111 at 2,048 (docs/kernels.md).
PALLAS_SELECTS_FROM = 16_384


class BackendError(ValueError):
    """The implementation that was asked for cannot run this problem; the text lists why each one refused."""


class Problem(NamedTuple):
    """What a probe may look at: the platform, the operands, and the op's static options."""

    platform: str  # "cpu", "gpu", "tpu"
    operands: tuple[jax.ShapeDtypeStruct, ...]
    options: Mapping[str, Any]
    is_named: bool = False  # whether the caller asked for this backend by name


class Backend(NamedTuple):
    """One entry of the table: `probe` returns None or the reason for a refusal, `load` the implementation."""

    probe: Callable[[Problem], str | None]
    load: Callable[[], Any]
    leads: Callable[[Problem], bool]  # whether it is asked before the usual order, where it was measured faster


_backends: dict[str, dict[str, Backend]] = {}
_used: dict[str, str] = {}
_logged: set[tuple[str, str]] = set()


def register(
    op: str, implementation: str, *, probe: Callable, load: Callable, leads: Callable = lambda problem: False
) -> None:
    """Adds a backend to an op; among those that accept a problem a leading one, then the order of IMPLEMENTATIONS."""
    checks.check_choice("implementation", implementation, IMPLEMENTATIONS)
    table = _backends.setdefault(op, {})
    table[implementation] = Backend(probe, load, leads)
    _backends[op] = {name: table[name] for name in IMPLEMENTATIONS if name in table}


def pick(op: str, implementation: str | None, operands: tuple, options: Mapping[str, Any]) -> Any:
    """The implementation of `op` that runs this problem: the named one, or the first that accepts.

    Raises BackendError when the named one is unknown or refuses, with the reason of each backend.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise BackendError(f"unknown implementation {implementation!r} for {op}: None, {', '.join(IMPLEMENTATIONS)}")
    problem = Problem(platform(), tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands), options)
    table, refusals = _backends[op], {}
    for name in sorted(IMPLEMENTATIONS, key=lambda name: name not in table or not table[name].leads(problem)):
        backend = table.get(name)
        asked = problem._replace(is_named=implementation == name)
        reason = f"{op} has no {name} kernel" if backend is None else backend.probe(asked)
        if reason is None and backend is not None and implementation in (None, name):
            _note(op, name)
            return backend.load()
        refusals[name] = reason or "can run this"
    wanted = f"implementation={implementation!r}" if implementation else "any implementation"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise BackendError(f"{op} cannot run with {wanted} on {problem.platform}. {reasons}.")


def used() -> dict[str, str]:
    """{op: backend} of everything that was traced so far in this process, the latest choice per op."""
    return dict(_used)


def platform() -> str:
    """Where an unplaced computation runs: JAX's default device, or default backend."""
    device = getattr(jax.config, "jax_default_device", None)  # None, a Device, or a platform name
    return jax.default_backend() if device is None else getattr(device, "platform", str(device))


def _note(op: str, name: str) -> None:
    _used[op] = name
    if (op, name) not in _logged:
        _logged.add((op, name))
        log.info("%s runs on %s", op, name)


def _anywhere(problem: Problem) -> str | None:
    """XLA compiles plain array code for every device."""
    del problem


def _triton(name: str = "probe") -> Callable:
    """A probe of triton_probe.py; imported late, because it needs this module."""
    return lambda problem: getattr(importlib.import_module("kernels_pallas.triton_probe"), name)(problem)


def _mosaic(problem: Problem) -> str | None:
    """The limits of the Mosaic GPU kernel; imported late, because it needs this module."""
    return importlib.import_module("kernels_pallas.pallas_probe").probe(problem)


def _module(name: str) -> Callable:
    return lambda: importlib.import_module(name)


for _op, _path in {
    "select_chunk": "kernels_pallas.top1_chunk.xla",
    "selective_scan": "kernels_pallas.selective_scan.xla",
    "ssd": "kernels_pallas.ssd.xla",
    "state_scan": "kernels_pallas.state_scan.xla",
    "top1_chunk_attention": "kernels_pallas.top1_chunk.xla",
    "top1_chunk_decode": "kernels_pallas.top1_chunk.xla_decode",
    "top1_element_attention": "kernels_pallas.top1_element.xla",
    "top1_element_decode": "kernels_pallas.top1_element.xla",
}.items():
    register(_op, "xla", probe=_anywhere, load=_module(_path))

for _op, _probe, _path in (
    ("select_chunk", "probe", "kernels_pallas.top1_chunk.triton_select"),
    ("selective_scan", "selective_scan", "kernels_pallas.selective_scan.triton"),
    ("ssd", "ssd", "kernels_pallas.ssd.triton"),
    ("state_scan", "state_scan", "kernels_pallas.state_scan.triton"),
    ("top1_chunk_attention", "probe", "kernels_pallas.top1_chunk.triton"),
    ("top1_element_attention", "probe", "kernels_pallas.top1_element.triton"),
    ("top1_element_decode", "probe", "kernels_pallas.top1_element.triton_decode"),
    ("top1_chunk_decode", "chunk_decode", "kernels_pallas.top1_chunk.triton_decode"),
):
    register(_op, "triton", probe=_triton(_probe), load=_module(_path))
register(
    "select_chunk",
    "pallas",
    probe=_mosaic,
    load=_module("kernels_pallas.top1_chunk.pallas"),
    leads=lambda problem: problem.operands[0].shape[1] >= PALLAS_SELECTS_FROM,
)
