"""Pictures: tests that look at numbers alone do without the files, which take longer than all else."""

from pathlib import Path

import pytest

from seqjax import pictures
from seqjax.study.report import figures, forest, points

MODULES = (figures, forest, points)


@pytest.fixture
def undrawn_pictures(monkeypatch):
    """Pictures are composed, without the places of names in pixels, and not drawn; their files are empty."""
    monkeypatch.setattr(pictures, "_lay_out", lambda panels: None)
    for module in MODULES:
        monkeypatch.setattr(module, "save", lambda figure, path: Path(path).touch())


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, by the names of their files; they are written as well."""
    figures_by_name, write = {}, figures.save

    def save(figure, path):
        figures_by_name[Path(path).name] = figure
        write(figure, path)

    for module in MODULES:
        monkeypatch.setattr(module, "save", save)
    return figures_by_name


@pytest.fixture
def composed(monkeypatch):
    """The figures that are composed, by the names of their files; nothing is written."""
    figures_by_name = {}
    for module in MODULES:
        monkeypatch.setattr(module, "save", lambda figure, path: figures_by_name.update({Path(path).name: figure}))
    return figures_by_name
