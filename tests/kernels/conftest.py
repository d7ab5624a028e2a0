import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from kernels_pallas import device, xla_tiles
from kernels_pallas.triton import runtime
from tests import extras
from tests.kernels.common import HOW, ON_GPU

HERE = Path(__file__).parent
SELECTIONS = ("exact", "best_key", "approx", "element")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases named triton: `gpu` where there is one, else run in Triton's interpreter, or visibly skipped.

    The interpreter takes a second or more for each, so the normal tests run one of a file's cases per selection, and
    the slow tests the others.
    """
    seen = set()
    for item in items:
        values = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        if HERE not in item.path.parents or not any("triton" in str(value) for value in values):
            continue
        if ON_GPU:
            item.add_marker(pytest.mark.gpu)
            continue
        why = runtime.refusal("cpu")
        if why is not None and not (extras.in_ci() and extras.lacking("torch", "triton")):
            item.add_marker(pytest.mark.skip(reason=why))
        case = (item.path, *(value for value in values if value in SELECTIONS))
        if case in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(case)


def pytest_report_header() -> str:
    if ON_GPU:
        return f"Triton kernels: {runtime.refusal(device.platform()) or 'on the GPU'}"
    return f"Triton kernels: {runtime.refusal('cpu') or 'in the interpreter'}"


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that the little arrays of a test need many of them. The interpreter's are small by themselves."""
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS", {})
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS_DEFAULT", 2**11)


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest) -> str:
    """Each way to Top-1 Chunk's result."""
    return request.param


@pytest.fixture(params=["exact", "best_key", "approx"])
def selection(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["xla", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each implementation of an op that has both."""
    return request.param


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Segments of two chunks in Triton's passes over time, in place of those that fill a GPU."""
    from kernels_pallas.state_scan.triton import segments

    passes = []
    monkeypatch.setattr(segments, "length", lambda *sizes, work: passes.append(sizes) or 2)
    yield
    assert passes


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """On a GPU XLA multiplies float32 in TF32 unless asked: the xla backend and the oracles are asked here."""
    with jax.default_matmul_precision("highest") if ON_GPU else contextlib.nullcontext():
        yield
