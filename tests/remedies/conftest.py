"""Fixtures of the remedies' tests."""

from pathlib import Path

import pytest

from tests.remedies.support import Commands


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    """Commands in the test's directory."""
    return Commands(tmp_path, monkeypatch, capsys)
