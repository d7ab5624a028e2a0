"""Runs that an earlier version left (tests/golden/workdirs) are evaluated, generated from, and go on.

Everything goes through the commands: those of one or two runs in this process, and slowly those of all in processes of
their own. How the archives were made, and why they stay: tests/golden/make_workdirs.py. The
run on the built-in corpus does not go on here, as its text follows the versions of what is installed.
"""

import contextlib
import functools
import importlib
import io
import json
from pathlib import Path

import jax
import pytest

from seqjax import train
from seqjax.sharding import make_mesh
from tests.golden import commands, make_losses, make_workdirs

GOLDEN = make_workdirs.read()["workdirs"]
LOOK = ("converted",)
GO_ON = ("approx",)


def in_this_process(todo, **options):
    """As `commands.run_each`; training on one device, as the runs were."""
    del options
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))
        for module, *argv in todo:
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                importlib.import_module(module).main(argv)
            results.append(commands.Result(0, out.getvalue(), err.getvalue()))
    return results


def groups(few, names):
    every = pytest.param(names, commands.run_each, marks=pytest.mark.slow, id="all")
    return [pytest.param(few, in_this_process, id="few"), every]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    return make_losses.unpack_blocks(tmp_path_factory.mktemp("golden") / "blocks")


@pytest.fixture(scope="module")
def looks(names, run, blocks, tmp_path_factory):
    """What `seqjax.evaluate` and `seqjax.generate` say of archives."""
    return make_workdirs.look(names, blocks, tmp_path_factory.mktemp("looks"), run=run)


def test_every_run_has_its_archive():
    archives = {path.stem for path in (make_workdirs.HERE / "workdirs").iterdir()}
    assert archives == GOLDEN.keys() == set(make_workdirs.NAMES)


@pytest.mark.parametrize(("names", "run"), groups(LOOK, make_workdirs.NAMES), scope="module")
def test_old_checkpoints_have_their_losses(looks):
    for name, look in looks.items():
        got, want = look["evaluation"], GOLDEN[name]["evaluation"]
        assert got["step"] == want["step"] == (0 if name == "converted" else make_workdirs.STOPPED)
        assert list(got["loss"]) == list(want["loss"])
        assert got["loss"] == pytest.approx(want["loss"], rel=make_losses.TOLERANCE), name


@pytest.mark.parametrize(("names", "run"), groups(LOOK, make_workdirs.NAMES), scope="module")
def test_old_checkpoints_generate_their_text(looks):
    assert {name: look["text"] for name, look in looks.items()} == {name: GOLDEN[name]["text"] for name in looks}


@pytest.mark.parametrize(("names", "run"), groups(GO_ON, make_workdirs.GO_ON))
def test_an_old_run_goes_on_as_if_it_had_not_stopped(names, run, blocks, tmp_path):
    rows = make_workdirs.go_on(names, blocks, tmp_path, run=run)
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
