"""Runs that an earlier version left (tests/golden/workdirs) are evaluated, generated from, and go on.

Everything goes through the commands. How the archives were made, and why they stay: tests/golden/make_workdirs.py. The
run on the built-in corpus does not go on here, as its text follows the versions of what is installed.
"""

import json
from pathlib import Path

import pytest

from tests.golden import make_losses, make_workdirs

GOLDEN = make_workdirs.read()["workdirs"]
FEW = ("approx", "hybrid")  # the others go on in the slow tests
SLOW = [name for name in make_workdirs.GO_ON if name not in FEW]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    return make_losses.unpack_blocks(tmp_path_factory.mktemp("golden") / "blocks")


@pytest.fixture(scope="module")
def looks(blocks, tmp_path_factory):
    """What `seqjax.evaluate` and `seqjax.generate` say of every archive."""
    return make_workdirs.look(list(GOLDEN), blocks, tmp_path_factory.mktemp("looks"))


def test_every_run_has_its_archive():
    archives = {path.stem for path in (make_workdirs.HERE / "workdirs").iterdir()}
    assert archives == GOLDEN.keys() == set(make_workdirs.NAMES)


@pytest.mark.parametrize("name", GOLDEN)
def test_an_old_checkpoint_has_its_losses(name, looks):
    got, want = looks[name]["evaluation"], GOLDEN[name]["evaluation"]
    assert got["step"] == want["step"] == (0 if name == "converted" else make_workdirs.STOPPED)
    assert list(got["loss"]) == list(want["loss"])
    assert got["loss"] == pytest.approx(want["loss"], rel=make_losses.TOLERANCE)


@pytest.mark.parametrize("name", GOLDEN)
def test_an_old_checkpoint_generates_its_text(name, looks):
    assert looks[name]["text"] == GOLDEN[name]["text"]


@pytest.mark.parametrize("names", [FEW, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["few", "rest"])
def test_an_old_run_goes_on_as_if_it_had_not_stopped(names, blocks, tmp_path):
    rows = make_workdirs.go_on(names, blocks, tmp_path)
    for name in names:
        assert not make_losses.beyond_tolerance(rows[name], GOLDEN[name]["rows"]), name
        finished = json.loads((tmp_path / name / "config.json").read_text())["train"]["steps"]
        assert rows[name][-1]["step"] == finished, name


def test_the_archives_depend_on_no_place(tmp_path):
    """No path of the machine that made them is left in them, but in Orbax's marks of success, which nobody reads."""
    for name in GOLDEN:
        workdir = make_workdirs.unpack(name, tmp_path / name, Path("/somewhere"))
        paths = [path for path in workdir.rglob("*") if path.is_file() and path.name != "commit_success.txt"]
        content = b"".join(path.read_bytes() for path in paths)
        assert (b'"/somewhere"' in content) == (name != "builtin"), name
        for root in (b"/tmp/", b"/home/", b"/root/"):
            assert root not in content, name
