import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from kernels_pallas import device, xla_tiles
from kernels_pallas.triton import interpreter, runtime
from tests import extras
from tests.kernels import gpu_sums
from tests.kernels.common import HOW, ON_GPU

HERE = Path(__file__).parent
SELECTIONS = ("exact", "best_key", "approx", "element")


@pytest.hookimpl(tryfirst=True)  # runs before `-m` reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases with `triton` as `gpu` on a GPU.

    Otherwise run them in the interpreter or skip them. The interpreter takes a second or more per case. The normal
    tests therefore run one case per file and selection; the other cases are slow tests.
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
    """Make tiles so small that test arrays need many.

    The interpreter's tiles are always small.
    """
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS", {})
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS_DEFAULT", 2**11)


@pytest.fixture(params=HOW)
def how(request: pytest.FixtureRequest) -> str:
    """Return each implementation of Top-1 Chunk."""
    return request.param


@pytest.fixture(params=["exact", "best_key", "approx"])
def selection(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["xla", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Return each backend of an op with two backends."""
    return request.param


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use segments of two chunks in Triton's passes over time.

    The default segments fill a GPU.
    """
    from kernels_pallas.state_scan.triton import segments

    passes = []
    monkeypatch.setattr(segments, "length", lambda *sizes, work: passes.append(sizes) or 2)
    yield
    assert passes


@pytest.fixture(autouse=os.environ.get("SEQJAX_TEST_SUMS") == "gpu")
def gpus_order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add in a GPU's order in the interpreter; SEQJAX_TEST_SUMS=gpu selects this for every test."""
    if interpreter.is_chosen():
        gpu_sums.use(monkeypatch)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Use full float32 precision: on a GPU, XLA uses TF32 by default."""
    with jax.default_matmul_precision("highest") if ON_GPU else contextlib.nullcontext():
        yield
