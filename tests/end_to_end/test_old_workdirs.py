"""Runs that an earlier version left (tests/golden/workdirs) are evaluated, generated from, and go on.

Everything goes through the commands. How the archives were made, and why they stay: tests/golden/make_workdirs.py. The
run on the built-in corpus does not go on here, as its text follows the versions of what is installed.
"""

import json
from pathlib import Path

import pytest

from tests.golden import make_losses, make_workdirs

GOLDEN = make_workdirs.read()["workdirs"]
# The others are for the slow tests.
LOOK = ("converted",)
GO_ON = ("approx",)


def groups(few, names):
    rest = [name for name in names if name not in few]
    return [pytest.param(few, id="few"), pytest.param(rest, marks=pytest.mark.slow, id="rest")]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    return make_losses.unpack_blocks(tmp_path_factory.mktemp("golden") / "blocks")


@pytest.fixture(scope="module", params=groups(LOOK, make_workdirs.NAMES))
def looks(request, blocks, tmp_path_factory):
    """What `seqjax.evaluate` and `seqjax.generate` say of archives."""
    return make_workdirs.look(request.param, blocks, tmp_path_factory.mktemp("looks"))


def test_every_run_has_its_archive():
    archives = {path.stem for path in (make_workdirs.HERE / "workdirs").iterdir()}
    assert archives == GOLDEN.keys() == set(make_workdirs.NAMES)


def test_old_checkpoints_have_their_losses(looks):
    for name, look in looks.items():
        got, want = look["evaluation"], GOLDEN[name]["evaluation"]
        assert got["step"] == want["step"] == (0 if name == "converted" else make_workdirs.STOPPED)
        assert list(got["loss"]) == list(want["loss"])
        assert got["loss"] == pytest.approx(want["loss"], rel=make_losses.TOLERANCE), name


def test_old_checkpoints_generate_their_text(looks):
    assert {name: look["text"] for name, look in looks.items()} == {name: GOLDEN[name]["text"] for name in looks}


@pytest.mark.parametrize("names", groups(GO_ON, make_workdirs.GO_ON))
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
        for root in (b"/tmp/", b"/home/", str(Path.home()).encode() + b"/"):
            assert root not in content, name
