"""Workdirs in the format of seqjax 0.1.0 (tests/golden/workdirs) evaluate, generate and resume.

Everything runs through the commands, in this process. tests/golden/make_workdirs.py made the archives and explains why
they stay.
"""

import contextlib
import functools
import importlib
import io
import json
from pathlib import Path

import jax
import pytest

import seqjax
from seqjax.errors import UserError
from seqjax.reading import read_json
from seqjax.sharding import make_mesh
from seqjax.training import loop, origin
from seqjax.training import workdir as workdirs
from tests.golden import commands, make_losses, make_workdirs

GOLDEN = make_workdirs.read()["workdirs"]
NAMES = list(make_workdirs.RUNS)


def in_this_process(todo, **options):
    """Call `commands.run_each`; train on one device, like the original runs."""
    del options
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:1]))
        for module, *argv in todo:
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                importlib.import_module(module).main(argv)
            results.append(commands.Result(0, out.getvalue(), err.getvalue()))
    return results


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    return make_losses.unpack_blocks(tmp_path_factory.mktemp("golden") / "blocks")


@pytest.fixture(scope="module")
def looks(blocks, tmp_path_factory):
    """Return the output of `seqjax.evaluate` and `seqjax.generate` for archives."""
    return make_workdirs.look(NAMES, blocks, tmp_path_factory.mktemp("looks"), run=in_this_process)


def test_every_run_has_its_archive():
    archives = {path.stem for path in (make_workdirs.HERE / "workdirs").iterdir()}
    assert archives == GOLDEN.keys() == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_newest_checkpoint_gives_the_recorded_losses_and_text(name, looks):
    got, want = looks[name]["evaluation"], GOLDEN[name]["evaluation"]
    assert got["step"] == want["step"] == make_workdirs.NEWEST[name]
    assert list(got["loss"]) == list(want["loss"])
    assert got["loss"] == pytest.approx(want["loss"], rel=make_losses.TOLERANCE)
    assert looks[name]["text"] == GOLDEN[name]["text"]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_the_uninterrupted_run(name, blocks, tmp_path):
    """Finished steps are not trained again: their rows keep their times."""
    kept = make_workdirs.unpack(name, tmp_path / "kept", blocks)
    before = {path.relative_to(kept): path.read_text() for path in kept.rglob("metrics.jsonl")}
    rows = make_workdirs.go_on([name], blocks, tmp_path, run=in_this_process)[name]
    want = GOLDEN[name]["rows"]
    assert rows.keys() == want.keys()
    for directory in want:
        assert not make_losses.beyond_tolerance(rows[directory], want[directory]), directory
    for path, text in before.items():
        assert (tmp_path / name / path).read_text().startswith(text), path
    assert read_json(tmp_path / name / "run.json")["rules"] == 1
    last = f"ends/{max(int(d.removeprefix('ends/')) for d in want if d != '.')}" if len(want) > 1 else "."
    assert rows[last][-1]["step"] == json.loads((tmp_path / name / "config.json").read_text())["train"]["steps"]


def test_an_old_run_without_run_json_is_not_resumed_by_new_rules(blocks, tmp_path):
    """A new run has other rules: its weight decay leaves out the tables."""
    in_this_process([make_workdirs.training("decay", tmp_path / "new", blocks)])
    assert read_json(tmp_path / "new" / "run.json")["rules"] == origin.RULES == 2
    (new,), (old,) = make_workdirs.rows(tmp_path / "new").values(), GOLDEN["decay"]["rows"].values()
    norms = [[row["train/param_norm"] for row in rows if "train/param_norm" in row] for rows in (new, old)]
    assert len(norms[0]) == len(norms[1]) == 6
    assert norms[0][-1] > norms[1][-1] * (1 + 5 * make_losses.TOLERANCE), "tables did not decay"
    workdir = make_workdirs.unpack("decay", tmp_path / "old", blocks)
    (workdir / "run.json").unlink()
    with pytest.raises(UserError, match=r"/run\.json .*another run.*run\.json"):
        in_this_process([make_workdirs.training("decay", workdir, blocks)])


@pytest.mark.parametrize("name", NAMES)
def test_a_model_loads_from_an_end(name, blocks, tmp_path):
    workdir = make_workdirs.unpack(name, tmp_path, blocks)
    assert json.loads((workdir / "config.json").read_text())["version"] == workdirs.VERSION
    for directory in [workdir, *workdir.glob("ends/*")]:
        assert 0 < seqjax.load(str(directory)).loss("abc def") < 20


def test_the_archives_contain_no_machine_paths(tmp_path):
    """Orbax's success markers, which nothing reads, may contain them."""
    for name in GOLDEN:
        workdir = make_workdirs.unpack(name, tmp_path / name, Path("/somewhere"))
        paths = [path for path in workdir.rglob("*") if path.is_file() and path.name != "commit_success.txt"]
        content = b"".join(path.read_bytes() for path in paths)
        assert b'"/somewhere"' in content, name
        for root in (b"/tmp/", b"/home/", str(Path.home()).encode() + b"/"):
            assert root not in content, name
