import pytest

from kernels_pallas import tiles


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that the little arrays of a test need many of them."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", {})
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_DEFAULT", 2**11)


@pytest.fixture(params=["masked", "sorted"])
def schedule(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["exact", "approx"])
def selection(request: pytest.FixtureRequest) -> str:
    return request.param
