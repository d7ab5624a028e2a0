"""The single-file mixer of docs/add_a_mixer.md: train, refuse, allow by name, judge.

A run keeps a copy of the file. Code in a workdir runs only if the user gives its name and its hash matches.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import seqjax
from seqjax import testing
from seqjax.commands import evaluate, generate
from seqjax.config import from_config_dict, presets
from seqjax.errors import UserError
from seqjax.mixers import _registry
from seqjax.training import workdir as workdirs
from seqjax.training.loop import train
from tests import support
from tests.end_to_end.test_outside_mixer import SMALL

PAGE = "docs/add_a_mixer.md"
EXAMPLE = support.page_block(PAGE, "class GatedEma(")
LOAD, FROM_PYTHON = support.page_block(PAGE, "allow_code"), support.page_block(PAGE, "import gema")


def forget(patch: pytest.MonkeyPatch) -> None:
    """Remove all mixers from outside seqjax from this process, as in a new process."""
    patch.setattr(_registry, "_registered", {})
    patch.setattr(_registry, "_by_file", set())
    sys.modules.pop("gema", None)


def small(cache: str) -> str:
    return ",".join(f"{key}={value}" for key, value in (SMALL | {"data.cache_dir": cache}).items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus_cache) -> Path:
    """Return a directory with gema.py and the run runs/x."""
    place = tmp_path_factory.mktemp("flat")
    (place / "gema.py").write_text(EXAMPLE)
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        train(
            from_config_dict(presets.read_config(f"{place}/gema.py:debug,{small(corpus_cache)}")), place / "runs" / "x"
        )
    return place


@pytest.fixture
def moved(trained, tmp_path, monkeypatch) -> Path:
    """Move the run to a directory without gema.py, in a process that does not know the mixer."""
    forget(monkeypatch)
    shutil.copytree(trained / "runs" / "x", tmp_path / "runs" / "x")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "x"


def test_readme_has_the_same_example():
    assert support.page_block("README.md", "class GatedEma(") == EXAMPLE


def test_a_run_keeps_the_file_and_its_hash(trained):
    run = trained / "runs" / "x"
    assert (run / "mixers" / "gema.py").read_text() == EXAMPLE
    assert json.loads((run / "run.json").read_text())["mixers"] == {
        "gema": hashlib.sha256(EXAMPLE.encode()).hexdigest()
    }


def test_without_its_name_no_code_of_a_workdir_runs(moved, monkeypatch):
    (moved / "mixers" / "gema.py").write_text("raise SystemExit('code ran')")
    Path("gema.py").write_text("raise SystemExit('code ran')")
    for command in (
        lambda: seqjax.load(moved),
        lambda: seqjax.load(moved, allow_code="gmea"),
        lambda: evaluate.main([f"--workdir={moved}"]),
        lambda: workdirs.save_config(moved, from_config_dict(presets.read_config("mamba2:debug"))),
    ):
        with pytest.raises(UserError, match=r"'gema'.*--allow-code=gema.*allow_code='gema'"):
            command()
    with pytest.raises(UserError, match=r"mixers/gema\.py .*SHA-256 .*run\.json"):
        seqjax.load(moved, allow_code="gema")
    (moved / "mixers" / "gema.py").unlink()
    with pytest.raises(UserError, match=r"/gema\.py cannot .*path"):
        seqjax.load(moved, allow_code="gema")


@pytest.mark.parametrize("name", ["seqjax.mixers.gema.py:GatedEma", "gema", "../gema.py:GatedEma", "gema.py:GatedEma"])
def test_a_name_in_a_workdir_never_opens_a_file_elsewhere(moved, name):
    """Checked without permission and, where the run has no copy, with it."""
    for place in (Path(), moved / "mixers", moved):
        (place / "gema.py").write_text("raise SystemExit('code ran')")
        (place / "seqjax.mixers.gema.py").write_text("raise SystemExit('code ran')")
    values = json.loads((moved / "config.json").read_text())
    values["model"]["mixer"]["name"] = name
    (moved / "config.json").write_text(json.dumps(values))
    for allow_code in ((), name):
        with pytest.raises(UserError, match=r"no copy|--allow-code=gema|SHA-256"):
            seqjax.load(moved, allow_code=allow_code)


def test_an_allowed_mixer_evaluates_generates_loads_and_is_checked(moved, capsys, monkeypatch):
    evaluate.main([f"--workdir={moved}", "--allow-code=gema"])
    assert all(np.isfinite(loss) for loss in json.loads((moved / "evaluation.json").read_text())["loss"].values())
    forget(monkeypatch)
    capsys.readouterr()
    generate.main([f"--workdir={moved}", "--prompt=The ", "--max_new_tokens=3", "--allow-code=gema"])
    assert capsys.readouterr().out.startswith("The ")
    forget(monkeypatch)
    space = {"seqjax": seqjax}
    exec(LOAD, space)
    mixer = type(space["m"].model.abstract_blocks()[0].mixer)
    assert mixer.__name__ == "GatedEma"
    quick = {name: testing.CHECKS[name] for name in ("parameters", "causality", "step")}
    monkeypatch.setattr(testing, "CHECKS", quick)
    Path("gema.py").write_text("another file")
    assert testing.check_mixer(mixer, settings={"expand": 1}) == [*quick]


def test_a_name_missing_from_the_run_is_refused(moved):
    with pytest.raises(UserError, match=r"--allow-code=gmea: .*'gema'"):
        generate.main([f"--workdir={moved}", "--allow-code=gema", "--allow-code=gmea"])


def test_a_changed_file_cannot_resume_the_run(trained, corpus_cache, moved, monkeypatch):
    Path("gema.py").write_text(EXAMPLE + "# other\n")
    config = from_config_dict(presets.read_config(f"gema.py:debug,{small(corpus_cache)}"))
    for command in (lambda: workdirs.save_config(moved, config), lambda: seqjax.load(moved)):
        with pytest.raises(UserError, match=r"another version .*'gema'.*--workdir"):
            command()
    forget(monkeypatch)
    Path("gema.py").write_text(EXAMPLE)
    workdirs.save_config(moved, from_config_dict(presets.read_config(f"gema.py:debug,{small(corpus_cache)}")))


def test_a_link_for_the_copies_is_not_followed(trained, corpus_cache, moved, tmp_path):
    shutil.move(moved / "mixers", tmp_path / "elsewhere")
    (moved / "mixers").symlink_to(tmp_path / "elsewhere")
    config = from_config_dict(presets.read_config(f"{trained}/gema.py:debug,{small(corpus_cache)}"))
    with pytest.raises(UserError, match=r"/mixers .*link .*/elsewhere"):
        workdirs.save_config(moved, config)


def test_two_files_with_one_name_cannot_share_a_copy(tmp_path, monkeypatch):
    forget(monkeypatch)
    (tmp_path / "one.py").write_text(EXAMPLE)
    (tmp_path / "gema.py").write_text(EXAMPLE.replace('"gema"', '"other"'))
    monkeypatch.chdir(tmp_path)
    presets.load_file(tmp_path / "one.py")
    pattern = "({'name':'gema'},{'name':'gema.py:GatedEma'})"
    config = from_config_dict(presets.read_config("transformer_pp:debug", [("model.mixer", pattern)]))
    with pytest.raises(UserError, match=r"same copy mixers/gema\.py"):
        workdirs.save_config(tmp_path / "run", config)


@pytest.mark.slow
def test_the_code_of_the_page_for_python(trained, corpus_cache, monkeypatch, tmp_path):
    forget(monkeypatch)
    shutil.copy(trained / "gema.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(testing, "CHECKS", {"parameters": testing.CHECKS["parameters"]})
    few = FROM_PYTHON.replace('"gema.py:debug"', repr(f"gema.py:debug,{small(corpus_cache)}")).replace('"100"', '"2"')
    space = {}
    exec(few, space)
    assert isinstance(space["m"].model.abstract_blocks()[0].mixer, space["gema"].GatedEma)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the checks, and runs of three models
def test_the_judge_command_of_the_page_runs_in_an_empty_directory(corpus_cache, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "seqjax").symlink_to(corpus_cache)
    (tmp_path / "empty" / "gema.py").write_text(EXAMPLE)
    (line,) = [x for x in (support.ROOT / PAGE).read_text().splitlines() if x.startswith("seqjax judge")]
    words = line.partition("#")[0].split()
    few = "train.steps=15,train.batch_size=8,train.seq_len=32,eval.tokens=256,optim.warmup_steps=2,model.n_layers=1"
    assert words == ["seqjax", "judge", "--config=./gema.py:debug"]
    command = [sys.executable, "-m", "seqjax", "judge", f"{words[2]},{few}", "--seeds=1"]
    environment = support.environment() | {"PYTHONPATH": str(support.ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = support.run(command, cwd=tmp_path / "empty", env=environment, timeout=1700)
    assert done.returncode == 0, done.stderr + done.stdout
    out = tmp_path / "empty" / "runs" / "judge"
    (page,) = out.glob("*/judge.md")
    assert "# gema" in page.read_text()
    runs = [json.loads(path.read_text()) for path in out.glob("*/runs/*/run.json")]
    assert {"gema": hashlib.sha256(EXAMPLE.encode()).hexdigest()} in [run.get("mixers") for run in runs]
    (tmp_path / "empty" / "gema.py").write_text(EXAMPLE + "# other\n")
    again = support.run(command, cwd=tmp_path / "empty", env=environment)
    assert again.returncode == 2 and "code: gema" in again.stderr
