"""Replace or record picture drawing, the slowest part of these tests."""

from pathlib import Path

import pytest

from seqjax import pictures
from seqjax.study.report import figures, forest, points

MODULES = (figures, forest, points)


@pytest.fixture
def undrawn_pictures(monkeypatch):
    """Compose pictures without label layout, and write empty files."""
    monkeypatch.setattr(pictures, "_lay_out", lambda panels: None)
    for module in MODULES:
        monkeypatch.setattr(module, "save", lambda figure, path: Path(path).touch())


@pytest.fixture
def drawn(monkeypatch):
    """Return the figures by file name; they are written, too."""
    figures_by_name, write = {}, figures.save

    def save(figure, path):
        figures_by_name[Path(path).name] = figure
        write(figure, path)

    for module in MODULES:
        monkeypatch.setattr(module, "save", save)
    return figures_by_name


@pytest.fixture
def composed(monkeypatch):
    """Return the figures by file name, without writing them."""
    figures_by_name = {}
    for module in MODULES:
        monkeypatch.setattr(module, "save", lambda figure, path: figures_by_name.update({Path(path).name: figure}))
    return figures_by_name
