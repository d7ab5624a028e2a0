"""The remedies in errors about runs, paths, processes and a user's files are followed."""

import ast
import contextlib
import dataclasses
import inspect
import json
import os
import re
import shutil
import socket
import sys
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seqjax
from seqjax import command_line, fields, mixers, pretrained, sharding, store, user_code
from seqjax.commands import cli, generate
from seqjax.commands import evaluate as evaluate_command
from seqjax.config import from_config_dict, presets
from seqjax.data import EvalBlocks
from seqjax.errors import UserError
from seqjax.mixers import _registry
from seqjax.training import (
    checkpoint,
    dry_run,
    eval_losses,
    evaluate,
    identity,
    lock,
    loop,
    metrics,
    processes,
    workdir,
    writers,
)
from tests import support
from tests.remedies.follow import write
from tests.remedies.support import GOLDEN, MEANT, NO_RUN, Case, Commands, cut, first_file, follow_case, unpack_run

TRAIN = "train --config=NAME:debug"
GENERATE = "generate --workdir=DIR/none"
# As in tests/remedies/test_commands.py.
COMMANDS: list[tuple[str, str, str, str]] = [
    (f"{TRAIN} --distributed", "needs (?P<another>--workdir)", "", "--distributed"),
    ("evaluate --workdir=DIR/none --tokens=-1", r"(?P<option>--\w+) must be at least (?P<value>\d)", "", NO_RUN),
    (f"{GENERATE} --prompts=DIR/none.txt", r"give a text file .* or a (?P<to>\.jsonl) file", "none.txt", NO_RUN),
    (f"{GENERATE} --prompt=a --seed=-1", r"(?P<option>seed) must be at least (?P<value>\d)", "", NO_RUN),
    (f"{GENERATE} --max_new_tokens=2147483648", r"less than (?P<to>214748364)8", "2147483648", NO_RUN),
    (f"{GENERATE} --prompt=\udc80", "correct the (?P<to>text)", "\udc80", NO_RUN),
    ("generate --workdir=file:x --prompt=a", r"this name is (?P<to>\./\S+)\.", "file:x", NO_RUN),
    ("evaluate --workdir=DIR/a\\\\b", "(?P<to>rename) the directory", "a\\\\b", NO_RUN),
    ("evaluate --workdir=DIR/LONG", "at most (?P<to>255) bytes; give a shorter one", "LONG", NO_RUN),
]
LONG = "x" * 256


@pytest.mark.parametrize(("line", "advice", "old", "then"), COMMANDS)
def test_a_command_as_the_error_advises(
    commands: Commands, tmp_path: Path, line: str, advice: str, old: str, then: str
):
    if old == "none.txt":
        write(tmp_path / ".jsonl", '{"prompt": "a"}\n')
    commands.follow(line.replace("LONG", LONG), advice, old.replace("LONG", LONG), then)


def test_a_command_shows_the_help_that_its_error_names(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        cli.run(["evaluate", "--nope"])
    match = re.search("`seqjax (.*)`", capsys.readouterr().err)
    assert match
    with pytest.raises(SystemExit, match="0"):
        cli.run(match[1].split())
    assert "--workdir" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- a user's file ends the run
MIXER = """
import os
from seqjax.mixers.base import RecurrentMixer
{top}
class Own(RecurrentMixer):
    def __init__(self, dim, *, rngs):
        {body}
    def init_cache(self, batch, max_len, dtype):
        return ()
    def step(self, x_BD, cache):
        return x_BD, cache
"""
CONFIG = """
import os
from seqjax import presets
{top}
def get_config(arg=""):
    {body}
    return presets.get_config(arg, name="mine", mixer={{"name": "own"}})
"""
STUDY = """
import os
{top}
def get_study():
    {body}
    runs = {{name: {{"workdir": name, "config": f"{{name}}:debug"}} for name in ("fox", "gla")}}
    return {{"title": "two", "references": ("gla",), "domains": ("arxiv",), "runs": runs}}
"""
USERS = {"own": MIXER, "mine": CONFIG, "study": STUDY}
BY_FILE = {
    "own": ("train --config=mine.py:debug", "judge --config=mine.py:debug --dry_run --rates=1e-3,2e-3 --seeds=1"),
    "study": ("study --study=study.py --list",),
}
BY_FILE["mine"] = BY_FILE["own"]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch):
    """Provide an empty registry of mixers."""
    monkeypatch.setattr(_registry, "_registered", {})
    monkeypatch.setattr(_registry, "_by_file", set())


def _users(root: Path, name: str = "", place: str = "", call: str = "pass") -> None:
    for file, text in USERS.items():
        calls = {at: call if (file, at) == (name, place) else "pass" for at in ("top", "body")}
        write(root / f"{file}.py", text.format(**calls))


class Left(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("place", ["top", "body"])
@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in BY_FILE.items() for line in lines])
@pytest.mark.usefixtures("registry")
def test_a_file_that_ends_the_process(
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    line: str,
    place: str,
):
    """With status 0 and no message, a script would take it for a success; the line in the error is the remedy."""
    status: list[int] = []

    def leave(number: int) -> None:
        status.append(number)
        raise Left

    if "judge" in line:
        monkeypatch.setattr("seqjax.study.judge.__main__.dry_run", lambda plan, jobs: "")
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(command_line, "leave", leave)
    _users(tmp_path, name, place, "os._exit(0)")
    try:
        error = commands.error_of(line).splitlines()[0]
    except Left:
        error = capsys.readouterr().err
    assert status == [2]
    match = re.search(r"(\S+\.py), line (\d+): .*os\._exit\(0\).* Remove that call", error)
    assert match, error
    lines = Path(match[1]).read_text().splitlines()
    assert lines[int(match[2]) - 1].strip() == "os._exit(0)"
    lines[int(match[2]) - 1] = lines[int(match[2]) - 1].replace("os._exit(0)", "pass")
    Path(match[1]).write_text("\n".join(lines))
    assert commands.error_of(line) == ""


def test_a_process_that_a_file_has_started_may_end_at_once(monkeypatch: pytest.MonkeyPatch):
    """As multiprocessing ends a forked process."""
    status: list[int] = []
    monkeypatch.setattr(os, "_exit", status.append)
    with command_line._reporting_exit():
        monkeypatch.setattr(os, "getpid", lambda: -1)
        os._exit(0)
    assert status == [0]


@pytest.mark.parametrize("place", ["top", "body"])
@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in BY_FILE.items() for line in lines])
@pytest.mark.usefixtures("registry", "commands")
def test_ctrl_c_in_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    line: str,
    place: str,
):
    """It ends as Ctrl-C anywhere else: one word, no traceback, status 130."""
    monkeypatch.setattr(command_line, "leave", sys.exit)
    _users(tmp_path, name, place, "raise KeyboardInterrupt")
    with pytest.raises(SystemExit, match="130"):
        cli.run(line.split())
    assert capsys.readouterr().err.split() == ["Interrupted."]


# ------------------------------------------------------------------------------------------------ runs and their files
def _config(name: str = "gla:debug", **settings: str) -> Any:
    return from_config_dict(presets.read_config(name, [(k.replace("__", "."), v) for k, v in settings.items()]))


def _check(to: str = "run", **changed: Any) -> Callable[[Path], Any]:
    """Return a check of the run's directory, with its own config but for `changed`."""

    def attempt(root: Path) -> None:
        config = workdir.load_config(root / "run")
        train = {key: changed.pop(key) for key in ("steps", "ends") if key in changed}
        config = dataclasses.replace(config, **changed, train=dataclasses.replace(config.train, **train))
        workdir.check_config(root / to, config)

    return attempt


def _ends(root: Path) -> Path:
    with zipfile.ZipFile(GOLDEN / "workdirs" / "ends.zip") as packed:
        packed.extractall(root / "run")
    return root / "run"


def _locked(to: str = "run") -> Callable[[Path], None]:
    def attempt(root: Path) -> None:
        with lock.locked(root / to):
            pass

    return attempt


def _another_host(seconds: float) -> Callable[[Path], Any]:
    """Leave a lock of a run on another host, touched `seconds` ago."""

    def spoil(root: Path) -> None:
        holder = lock.Holder("elsewhere", "", 1, "1", "today", "0")
        write(root / "run" / lock.FILE, json.dumps(holder._asdict()))
        at = time.time() - seconds
        os.utime(root / "run" / lock.FILE, (at, at))

    return spoil


def _edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _edited(name: str, **values: Any) -> Callable[[Path], Any]:
    """Unpack a run, keep a copy as `root`/copy, and edit one of its files."""

    def spoil(root: Path) -> None:
        shutil.copytree(unpack_run(root), root / "copy")
        if not (root / "run" / "run.json").is_file():
            write(root / "run" / "run.json", "{}")
        _edit(root / "run" / name, **values)

    return spoil


def _edited_config(root: Path) -> None:
    values = json.loads((unpack_run(root) / "config.json").read_text())
    write(root / "run" / "run.json", json.dumps({"identity": "0", "settings": [identity.settings_of(values)]}))
    shutil.copytree(root / "run", root / "copy")
    _edit(root / "run" / "config.json", name="other")


def _copy_back(root: Path, match: re.Match[str]) -> None:
    """Replace the file or directory that the error names by its copy."""
    path = Path(match["path"])
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    there = root / "copy" / path.relative_to(root / "run")
    shutil.copytree(there, path) if there.is_dir() else shutil.copy(there, path)


def _away(root: Path, match: re.Match[str]) -> None:
    Path(match["path"]).rename(root / "moved")


def _gone(_: Path, match: re.Match[str]) -> None:
    path = Path(match["path"])
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _with_mixer(root: Path) -> None:
    """Write a run of own.py, without a checkpoint, and forget the mixer."""
    _users(root)
    config = _config("mine.py:debug")
    workdir.save_config(root / "run", config)
    hashes = mixers.source_hashes(mixer.name for mixer in config.model.mixers)
    write(root / "run" / "run.json", json.dumps({"mixers": hashes}))
    shutil.copytree(root / "run", root / "copy")
    _registry._registered.clear()


def _load_allowed(root: Path, *names: str) -> None:
    workdir.require_named(root / "run", workdir.load_config(root / "run", allow_code=names), names)


def _without_copy(root: Path) -> None:
    _with_mixer(root)
    (root / "run" / "run.json").unlink()


def _registered(root: Path, _: Any) -> Callable[[], Any]:
    cls = mixers.load("own.py:Own")
    return lambda: [mixers.register("own")(cls), workdir.load_config(root / "run")]


def _changed_mixer(root: Path) -> None:
    _with_mixer(root)
    with (root / "own.py").open("a") as file:
        file.write("# changed\n")


def _changed_copy(root: Path) -> None:
    _with_mixer(root)
    with (root / "run" / "mixers" / "own.py").open("a") as file:
        file.write("# changed\n")


def _two_of_one_name(root: Path, second: str = "at/own.py") -> None:
    _users(root)
    write(root / second, (root / "own.py").read_text().replace("class Own", "class Other"))
    names = f'({{"name": "own"}}, {{"name": "{second}:Other"}})'
    write(root / "mine.py", (root / "mine.py").read_text().replace('{"name": "own"}', names))


def _checkpoints(root: Path) -> checkpoint.Checkpoints:
    checkpoints = checkpoint.Checkpoints(root / "run", read_only=True)
    if checkpoints.latest is not None:
        checkpoints.require_intact(("params", "rest"))
    return checkpoints


def _spoilt(name: str, spoil: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def attempt(root: Path) -> None:
        shutil.copytree(unpack_run(root), root / "copy")
        spoil(first_file(root / "run", name))

    return attempt


def _as_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def _huge(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(1 << 40)


def _processes(count: int) -> Callable[[Path], None]:
    def attempt(root: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "process_count", lambda: count)
            checkpoint._require_same_process_count(root / "run" / "checkpoints" / "3")

    return attempt


def _blocks(seed: int = 0) -> dict[str, EvalBlocks]:
    tokens = np.random.default_rng(seed).integers(0, 100, (3, 9), dtype=np.uint16)
    return {"c4": EvalBlocks(tokens, np.arange(3), np.array([0, 0, 1]), np.full(3, 20))}


def _evaluated(root: Path) -> None:
    (root / "run").mkdir()
    eval_losses.start(root / "run", _blocks(), step=0)


def _rows(root: Path) -> None:
    write(root / "run" / "metrics.jsonl", '{"step": 1}\n{"step": 2}\n')
    shutil.copytree(root / "run", root / "copy")
    cut(root / "run" / "metrics.jsonl")
    (root / "run" / "checkpoints" / "2").mkdir(parents=True)


def _append(root: Path, position: int = 24, step: int = 2) -> None:
    writers.Metrics(root / "run", position=position, step=step, tensorboard=False).close()


def _damaged_row(root: Path) -> None:
    write(root / "run" / "metrics.jsonl", '{"step": 1}\nx\n{"step": 2}\n')
    write(root / "copy" / "metrics.jsonl", '{"step": 1}\n{"step": 2}\n')


def _without_damaged_row(root: Path, _: Any) -> None:
    path = root / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace("x\n", ""))


def _weights(**changed: Any) -> Callable[[Path], str]:
    def attempt(root: Path) -> str:
        source = workdir.load_config(root / "run")
        model = dataclasses.replace(source.model, **changed)
        return pretrained.describe_weights(str(root / "run"), dataclasses.replace(source, model=model))

    return attempt


def _with_positions(seq_len: str) -> Callable[[Path], Any]:
    """Return a look at the weights of a run with a position table, for a run of `seq_len` tokens."""

    def attempt(root: Path) -> str:
        config = _config("transformer_pp:debug", model__mixer__const="k", train__seq_len=seq_len)
        return pretrained.describe_weights(str(root / "run"), config)

    return attempt


def _run_with_positions(root: Path) -> None:
    config = _config("transformer_pp:debug", model__mixer__const="k")
    workdir.save_config(root / "run", config)
    (root / "run" / "checkpoints" / "1").mkdir(parents=True)


def _fresh(label: str = "a") -> Callable[[Path], Any]:
    def attempt(_: Path) -> Any:
        return workdir.fresh(dataclasses.replace(_config(), name=label))

    return attempt


def _new(check: Callable[..., Any]) -> Callable[[Path, Any], Callable[[], Any]]:
    """Follow "another --workdir": the same attempt succeeds there."""
    return lambda root, _: lambda: check("new")(root)


# ----------------------------------------------------------------------------------------------- a run that is resumed
def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without the tests' checks of types, which refuse stand-ins."""
    return inspect.unwrap(function)


def _setup(**arguments: Any) -> Any:
    config = types.SimpleNamespace(train=types.SimpleNamespace(steps=arguments.pop("steps", 9)))
    corpus = types.SimpleNamespace(manifest_hash=arguments.pop("manifest", "a"))
    iterator = types.SimpleNamespace(get_state=dict)
    defaults = {"mirror": "run", "target": None, "origin": {"rules": 2}}
    return types.SimpleNamespace(config=config, corpus=corpus, iterator=iterator, **defaults | arguments)


def _resumed(**arguments: Any) -> Any:
    """Resume after step 3 of a run whose checkpoint has the manifest "a" and the rules 2."""
    log = {"manifest": "a", "rules": 2}
    kept = types.SimpleNamespace(latest=3, params_only=False, restore=lambda *_: (None, log), recorded_identity="")
    return _plainly(loop._restored)(_setup(**arguments), kept, "run")


def _resumed_at(root: Path, steps: int) -> Any:
    kept = checkpoint.Checkpoints(root / "run", read_only=True)
    return _plainly(loop._restored)(_setup(steps=steps), kept, root / "run")


def _begun(weights: Any = None, **origin: Any) -> Any:
    state = types.SimpleNamespace(_replace=lambda **_: None, params={})
    setup = _setup(origin={"rules": 2, "identity": "0"} | origin, init=lambda: state)
    setup.target, setup.corpus.test_sets = types.SimpleNamespace(params={}), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.identity, "of", lambda *_, **__: "0")
        return _plainly(loop._fresh)(setup, types.SimpleNamespace(params_only=False), weights)


def _reached(root: Path) -> None:
    config = workdir.load_config(root / "run")
    setup = types.SimpleNamespace(config=config, mirror=loop.mirrors.Mirror(root / "run"), origin={})
    _plainly(loop._require_reachable)(setup, 4, extended=False)


def _without_an_end(root: Path) -> None:
    shutil.copytree(_ends(root), root / "copy")
    for end in (root / "run" / "ends").iterdir():
        shutil.rmtree(end)


def _edited_model(root: Path) -> None:
    shutil.copytree(unpack_run(root), root / "copy")
    values = json.loads((root / "run" / "config.json").read_text())
    values["model"]["mlp"]["dim"] *= 2
    (root / "run" / "config.json").write_text(json.dumps(values))


def _taken(root: Path, to: str = "run") -> None:
    with pytest.MonkeyPatch.context() as patch:
        create = lock._create
        patch.setattr(lock, "_create", lambda path, content: "run/" not in path and create(path, content))
        patch.setattr(lock, "_age", lambda path: None)
        _locked(to)(root)


FILES: dict[str, Case] = {
    "another run's lock, elsewhere": (_another_host(10), _locked(), "another (?P<option>--workdir)", _new(_locked)),
    "another run's lock, stopped": (
        _another_host(10),
        _locked(),
        r"(?P<path>\S+) is in use .* stop that run first",
        lambda root, _: (root / "run" / lock.FILE).unlink(),
    ),
    "another run's lock, later": (
        _another_host(10),
        _locked(),
        r"try again in (?P<seconds>\d+) s",
        lambda root, match: os.utime(root / "run" / lock.FILE, (0, time.time() - 11 - int(match["seconds"]))),
    ),
    "a lock of tomorrow": (
        _another_host(-90),
        _locked(),
        r"its (?P<file>run\.lock) is dated .* delete that file",
        lambda root, match: (root / "run" / match["file"]).unlink(),
    ),
    "a lock below a file": (
        lambda root: write(root / "file", ""),
        _locked("file/run"),
        "another (?P<option>--workdir)",
        _new(_locked),
    ),
    "runs is a file": (
        lambda root: write(root / "runs", ""),
        _fresh(),
        "give a (?P<option>--workdir)",
        lambda root, _: lambda: workdir.save_config(root / "new", _config()),
    ),
    "a run of a long name": (
        lambda _: None,
        _fresh("a" * 250),
        "give a (?P<option>--workdir)",
        lambda root, _: lambda: workdir.save_config(root / "new", dataclasses.replace(_config(), name="a" * 250)),
    ),
    "a workdir below a file": (
        lambda root: write(root / "file", ""),
        lambda root: workdir.save_config(root / "file" / "run", _config()),
        "another (?P<option>--workdir)",
        lambda root, _: lambda: workdir.save_config(root / "new", _config()),
    ),
    "a run of another length": (
        unpack_run,
        _check(steps=9),
        "another (?P<o>--workdir)",
        _new(lambda to: _check(to, steps=9)),
    ),
    "a run of another length, with ends": (
        unpack_run,
        _check(steps=9),
        r"with (?P<key>config\.train\.ends) can be extended",
        lambda root, _: [shutil.rmtree(root / "run"), _ends(root), lambda: _check(steps=16)(root)][2],
    ),
    "code that is not allowed": (
        _with_mixer,
        _load_allowed,
        "--allow-code=(?P<name>\\w+),",
        lambda root, match: lambda: _load_allowed(root, match["name"]),
    ),
    "code of another name": (
        _with_mixer,
        lambda root: _load_allowed(root, "own", "onw"),
        MEANT,
        lambda root, match: lambda: _load_allowed(root, match["to"]),
    ),
    "code without a copy": (_without_copy, _load_allowed, "Register the class in Python", _registered),
    "a changed copy of code": (
        _changed_copy,
        lambda root: _load_allowed(root, "own"),
        r"^(?P<path>\S+) is not the file .* Put back the file",
        _copy_back,
    ),
    "changed code, put back": (
        _changed_mixer,
        lambda root: workdir.check_config(root / "run", _config("mine.py:debug")),
        r"than (?P<path>\S+)\. Restore its copy (?P<copy>\S+),",
        lambda _, match: shutil.copy(match["copy"], match["path"]),
    ),
    "changed code, elsewhere": (
        _changed_mixer,
        lambda root: workdir.check_config(root / "run", _config("mine.py:debug")),
        "another (?P<option>--workdir)",
        lambda root, _: lambda: workdir.check_config(root / "new", _config("mine.py:debug")),
    ),
    "two mixers of one file name": (
        _two_of_one_name,
        lambda root: workdir.save_config(root / "run", _config("mine.py:debug", model__n_layers="2")),
        "Rename one of the mixers",
        lambda root, _: _two_of_one_name(root, "at/other.py"),
    ),
    "a run of an old version": (
        _edited("config.json", version=3),
        _check(),
        "another (?P<option>--workdir)",
        lambda root, _: lambda: workdir.check_config(root / "new", _config()),
    ),
    "a run of a later version": (
        _edited("config.json", version=99),
        _check(),
        r"(?P<path>\S+) was written by a later seqjax: .* this one reads (?P<version>\d+)",
        lambda _, match: _edit(Path(match["path"]), version=int(match["version"])),
    ),
    "a run of later rules": (
        _edited("run.json", rules=99),
        lambda root: loop.origin.read(root / "run"),
        r"(?P<path>\S+): the run began .* up to (?P<rules>\d+)\. Update",
        lambda _, match: _edit(Path(match["path"]), rules=int(match["rules"])),
    ),
    "an edited config": (
        _edited_config,
        lambda root: identity.require(root / "run"),
        r"(?P<path>\S+/config\.json) and run\.json .* Put back this run's copy",
        _copy_back,
    ),
    "an end of another run": (
        lambda root: [write(root / "run" / place / "run.json", '{"identity": "0"}') for place in ("", "ends/3")],
        lambda root: identity.require(root / "run"),
        r"(?P<path>\S+) belongs to another run: .* move it away",
        _away,
    ),
    "a damaged row": (
        _damaged_row,
        lambda root: metrics.read(root / "run"),
        r"(?P<path>\S+metrics\.jsonl).* put back a copy",
        _copy_back,
    ),
    "a damaged row, removed": (
        _damaged_row,
        lambda root: metrics.read(root / "run"),
        "remove the damaged (?P<what>lines)",
        _without_damaged_row,
    ),
    "rows are lost, put back": (_rows, _append, r"^(?P<path>\S+) has lost rows.* (?i:put back a copy)", _copy_back),
    "rows are lost, moved": (_rows, _append, r"^(?P<path>\S+) has lost rows.* move the file away", _away),
    "rows are lost, an earlier checkpoint": (
        _rows,
        _append,
        r"delete (?P<path>\S+) to resume from the previous checkpoint",
        lambda root, match: [_gone(root, match), lambda: _append(root, position=12, step=1)][1],
    ),
    "no checkpoint": (
        lambda _: None,
        lambda root: checkpoint.Checkpoints(root / "run", read_only=True).restore_params({}),
        "(?P<how>Train) first",
        lambda root, _: [unpack_run(root), lambda: _checkpoints(root)][1],
    ),
    "a checkpoint's metadata is cut": (
        _spoilt("checkpoints/3/_CHECKPOINT_METADATA", cut),
        _checkpoints,
        r"(?P<path>\S+/checkpoints/3) is damaged[\s\S]*put back a copy of the directory",
        _copy_back,
    ),
    "a checkpoint's array is cut": (
        _spoilt("checkpoints/3/params/d/*", cut),
        _checkpoints,
        r"(?P<path>\S+/checkpoints/3)\b",
        _copy_back,
    ),
    "a checkpoint has a link": (
        _spoilt("checkpoints/3/params/_METADATA", _as_a_link),
        _checkpoints,
        r"(?P<path>\S+/checkpoints/3)/\S+ is not a file .* Put back a copy of the checkpoint",
        _copy_back,
    ),
    "a checkpoint has a link, deleted": (
        _spoilt("checkpoints/3/params/_METADATA", _as_a_link),
        _checkpoints,
        r"(?P<path>\S+/checkpoints/3)/\S+ is not a file .* or delete it",
        _gone,
    ),
    "a checkpoint's metadata is huge": (
        _spoilt("checkpoints/3/params/_METADATA", _huge),
        _checkpoints,
        r"(?P<path>\S+/checkpoints/3)/\S+ has .* Put back a copy of the checkpoint",
        _copy_back,
    ),
    "a checkpoint of two processes": (
        _spoilt(
            "checkpoints/3/data/process_0-of-1.json", lambda path: path.rename(path.with_name("process_0-of-2.json"))
        ),
        _processes(1),
        r"start (?P<count>\d+) processes again",
        lambda root, match: lambda: _processes(int(match["count"]))(root),
    ),
    "other text, put back": (
        _evaluated,
        lambda root: eval_losses.start(root / "run", _blocks(1), step=1),
        "Put back the (?P<what>earlier data)",
        lambda root, _: lambda: eval_losses.start(root / "run", _blocks(), step=1),
    ),
    "other text, elsewhere": (
        _evaluated,
        lambda root: eval_losses.start(root / "run", _blocks(1), step=1),
        "another (?P<option>--workdir)",
        lambda root, _: lambda: [(root / "new").mkdir(), eval_losses.start(root / "new", _blocks(1), step=1)],
    ),
    "weights of another model": (
        unpack_run,
        _weights(dim=999),
        r"model\.(?P<key>dim): (?P<theirs>\d+).* copy its config.model",
        lambda root, match: lambda: _weights(**{match["key"]: int(match["theirs"])})(root),
    ),
    "weights without a checkpoint": (
        lambda root: shutil.rmtree(unpack_run(root) / "checkpoints"),
        _weights(),
        "let that run reach its first (?P<what>save)",
        lambda root, _: unpack_run(root),
    ),
    "weights of another length": (
        _run_with_positions,
        _with_positions("64"),
        r"config\.train\.seq_len=(?P<seq_len>\d+)",
        lambda root, match: lambda: _with_positions(match["seq_len"])(root),
    ),
    "runs that start together": (
        lambda _: None,
        _taken,
        "another (?P<option>--workdir)",
        _new(lambda to: lambda root: _taken(root, to)),
    ),
    "a checkpoint beyond the end": (
        unpack_run,
        lambda root: _resumed_at(root, 2),
        r"(?P<path>\S+/checkpoints/3) is beyond the end .*; move it away",
        lambda root, match: [_away(root, match), lambda: _resumed_at(root, 2)][1],
    ),
    "an end is lost": (
        _without_an_end,
        _reached,
        r"(?P<path>\S+) lacks the results of this end .* Put the directory back",
        lambda root, match: shutil.copytree(
            root / "copy" / Path(match["path"]).relative_to(root / "run"), match["path"], dirs_exist_ok=True
        ),
    ),
    "a config that does not fit its checkpoint": (
        _edited_model,
        lambda root: evaluate.restore(root / "run"),
        "Put back its run's (?P<name>config\\.json)",
        lambda root, match: shutil.copy(root / "copy" / match["name"], root / "run" / match["name"]),
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("registry")
def test_files_as_the_error_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    follow_case(tmp_path, FILES[name])


# ------------------------------------------------------------------------------- settings, paths, devices and processes
# A call that fails, the advice in its error, and a call that follows the words of the advice.
Call = tuple[Callable[[], Any], str, Callable[..., Any]]
GIVEN = {"SLURM_NTASKS": "4"}


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of settings, one of them without a default."""

    width: int
    names: tuple[str, ...] = ()


def _mesh(**sizes: Any) -> Any:
    return sharding.make_mesh(**sizes)


def _pieces(seq_len: int, seq: int) -> None:
    sharding.require_equal_pieces(seq_len, _mesh(seq=seq))


def _heads(n: int) -> None:
    with jax.set_mesh(_mesh(seq=4)):
        jax.eval_shape(sharding.time_to_heads, jax.ShapeDtypeStruct((2, 8, n, 4), jnp.float32))


def _train(path: str | Path, **settings: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_train_segments", lambda *_, **__: True)
        assert loop.train(_config(**settings), path)


def _without_jit() -> None:
    with jax.disable_jit():
        _train("unused")


def _port(port: int) -> None:
    with socket.create_server(("", port)) as taken:
        processes._require_free(taken.getsockname()[1] if port == 0 else port + 1)


def _wandb(project: str | None, **package: Any) -> None:
    """Start the logs of a run that `project` chooses, with a package that does `package`."""

    class Error(Exception):
        pass

    def init(**_: Any) -> Any:
        if package.get("mode") != "offline":
            raise Error("no login")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", types.SimpleNamespace(Error=Error, init=init) if package else None)
        if project:
            writers.WandbRun(Path(), project, settings={})


def _across(seq: int) -> None:
    """Split sequences over `seq` of eight devices in four processes."""
    devices = np.array([types.SimpleNamespace(process_index=i // 2) for i in range(8)])
    mesh = types.SimpleNamespace(shape={"seq": seq, "tensor": 1}, devices=devices)
    _plainly(sharding.require_equal_pieces)(8, mesh)


def _opened(*, installed: bool) -> None:
    def url_to_fs(url: str) -> Any:
        if not installed:
            raise ImportError("Install gcsfs")
        return types.SimpleNamespace(_strip_protocol=str), url

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_systems", {})
        patch.setattr(store.fsspec.core, "url_to_fs", url_to_fs)
        store.filesystem("gs://b/x")


def _restored(*_: Any, **__: Any) -> Any:
    config = _config()
    return config, None, {}, 3, None


def _generated(tokens: int, most: int = 5) -> None:
    def stream(*_: Any, n_new: int, **__: Any) -> Any:
        if n_new > most:
            raise MemoryError
        yield "a"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "restore", _restored)
        patch.setattr(generate, "stream", stream)
        generate.main(["--workdir=run", "--prompt=a", f"--max_new_tokens={tokens}"])


def _measured(path: str) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise LookupError

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(LookupError):
        patch.setattr(evaluate_command, "restore", _restored)
        patch.setattr(evaluate_command, "open_test_sets", read)
        evaluate_command.main(["--workdir=run", f"--data={path}"])


CALLS: dict[str, Call] = {
    "no text as a path": (lambda: store.location(""), r"write `(?P<path>.)`", store.location),
    "a path like a URL": (
        lambda: store.location("file:x"),
        r"is (?P<path>\./\S+)\.$",
        store.location,
    ),
    "a URL as a path": (
        lambda: store.local("gs://b/x", "--out"),
        "(?P<option>--out)=.* a path of this machine",
        lambda option: store.local("x", option),
    ),
    "a path with a zero": (lambda: store.location("a\0b"), "leave it out", lambda: store.location("ab")),
    "a pattern as a path": (
        lambda: store.require_workdir("a[1]"),
        r"about '(?P<mark>.)' in a path; rename",
        lambda mark: store.require_workdir("a[1]".replace(mark, "")),
    ),
    "another store": (
        lambda: store.require_workdir("s3://b/run"),
        r"or in (?P<workdir>gs://BUCKET/PATH)\.",
        store.require_workdir,
    ),
    "another store, a directory": (
        lambda: store.require_workdir("s3://b/run"),
        "mount the bucket and give the directory",
        lambda: store.require_workdir("/mnt/b/run"),
    ),
    "a URL with two dots": (
        lambda: store.require_workdir("gs://b/a/../c"),
        "write the path without `.` and `(?P<dots>..)`",
        lambda dots: store.require_workdir(f"gs://b/a/{dots}/c".replace(f"a/{dots}/", "")),
    ),
    "a scheme that runs code": (
        lambda: store.filesystem("reference://b/x"),
        "Copy the data to a directory",
        lambda: store.filesystem("x"),
    ),
    "an unknown scheme": (
        lambda: store.filesystem("nope://b/x"),
        "Give a local path",
        lambda: store.filesystem("x"),
    ),
    "a mesh of two unknown sizes": (
        lambda: _mesh(data=-1, fsdp=-1),
        r"at most one may be (?P<size>-1)",
        lambda size: _mesh(data=int(size), fsdp=2),
    ),
    "a mesh of another product": (
        lambda: _mesh(data=3),
        "whose product is the number of devices",
        lambda: _mesh(data=2, fsdp=2, tensor=2),
    ),
    "sequences in unequal pieces": (
        lambda: _pieces(10, 4),
        r"config\.mesh\.seq=4 .*seq_len=(?P<seq_len>\d+); change one",
        lambda seq_len: [_pieces(int(seq_len), 2), _pieces(12, 4)],
    ),
    "heads that the devices cannot share": (
        lambda: _heads(6),
        r"choose a divisor of every mixer's (?P<what>heads)",
        lambda what: _heads(8),
    ),
    "a setting that is missing": (
        lambda: fields.build(Group, {}, "config.group"),
        r"config\.group\.(?P<key>\w+) is missing.* set it",
        lambda key: fields.build(Group, {key: 3}, "config.group"),
    ),
    "a setting of another type": (
        lambda: fields.build(Group, {"width": "a"}, "config.group"),
        r"width must be (?P<kind>int)",
        lambda kind: fields.build(Group, {"width": {"int": 3}[kind]}, "config.group"),
    ),
    "a setting that is no list": (
        lambda: fields.build(Group, {"width": 3, "names": "a"}, "config.group"),
        r"write \('(?P<name>a)',\)",
        lambda name: fields.build(Group, {"width": 3, "names": (name,)}, "config.group"),
    ),
    "several tasks, one process": (
        lambda: processes.require_one_process(GIVEN),
        "or unset (?P<name>SLURM_NTASKS)",
        lambda name: processes.require_one_process({key: GIVEN[key] for key in GIVEN if key != name}),
    ),
    "several tasks, one of them": (
        lambda: processes.require_one_process(GIVEN),
        "`srun --ntasks=(?P<n>1)`",
        lambda n: processes.require_one_process(GIVEN | {"SLURM_STEP_NUM_TASKS": n}),
    ),
    "a port that is taken": (lambda: _port(0), "another port in --coordinator_address", lambda: _port(27183)),
    "no devices": (
        lambda: dry_run.simulated_devices(0),
        r"number of devices to simulate, (?P<n>1) or more",
        lambda n: dry_run.simulated_devices(int(n)),
    ),
    "a run on other data": (
        lambda: _resumed(manifest="b"),
        r"manifest (?P<manifest>\w+), now b\)\. Point config\.data\.path at the same data",
        lambda manifest: _resumed(manifest=manifest),
    ),
    "a run without its rules": (
        lambda: _resumed(origin={"rules": 1}),
        r"Put back a copy of (?P<file>run\.json)",
        lambda file: _resumed(origin={"rules": 2}),
    ),
    "a run that began with weights": (
        lambda: _begun(init_from={"path": "there"}),
        "give --init_from=(?P<path>there) again",
        lambda path: _begun(loop.Weights(path, lambda *_: ({}, 3)), init_from={"path": path}),
    ),
    "a run that began with weights, elsewhere": (
        lambda: _begun(init_from={"path": "there"}),
        "another (?P<option>--workdir) to begin without",
        lambda option: _begun(),
    ),
    "sequences split across processes": (
        lambda: _across(4),
        "seq times config.mesh.tensor must divide the number of devices",
        lambda: _across(2),
    ),
    "a directory as a Python file": (
        lambda: user_code.read("."),
        "give the path of a Python (?P<kind>file)",
        lambda kind: [write(Path("own.py"), ""), user_code.read("own.py")],
    ),
    "a package of a store": (
        lambda: _opened(installed=False),
        r"pip install 'seqjax\[(?P<extra>gcs)\]'",
        lambda extra: _opened(installed=True),
    ),
    "too many new tokens": (
        lambda: _generated(9),
        r"(?P<option>--max_new_tokens)=9 .*; give fewer",
        lambda option: _generated(3),
    ),
    "no directory of test data": (
        lambda: _measured("none"),
        r"(?P<option>--data): there is no directory (?P<path>\S+); give one",
        lambda option, path: [Path(path).mkdir(), _measured(path)],
    ),
    "ends in a store": (
        lambda: _train("gs://b/run", train__ends="0.5,1"),
        "give a directory of this machine",
        lambda: _train("run", train__ends="0.5,1"),
    ),
    "training without compilation": (_without_jit, "JAX_DISABLE_JIT .*unset it", lambda: _train("run")),
    "no package for a log": (lambda: _wandb("p"), r"config\.log\.wandb=(?P<off>None)\.", lambda off: _wandb(None)),
    "no package for a log, installed": (
        lambda: _wandb("p"),
        "pip install 'seqjax\\[(?P<extra>wandb)\\]'",
        lambda extra: _wandb("p", mode="offline"),
    ),
    "no login for a log": (
        lambda: _wandb("p", mode="online"),
        "WANDB_MODE=(?P<mode>offline)",
        lambda mode: _wandb("p", mode=mode),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_as_the_error_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    wrong, advice, right = CALLS[name]
    with pytest.raises(UserError) as error:
        wrong()
    match = re.search(advice, str(error.value))
    assert match, error
    right(**match.groupdict())


def test_an_empty_text_as_the_error_advises(tmp_path: Path):
    loaded = seqjax.load(unpack_run(tmp_path))
    with pytest.raises(UserError, match="at least one character"):
        loaded.loss("")
    assert loaded.loss("a") > 0


def test_a_shell_without_letters_as_the_error_advises(tmp_path: Path):
    """In a process of its own, because Python reads the locale once."""
    code = "import sys; from seqjax import store\ntry: store.location(sys.argv[1])\nexcept Exception as e: print(e)"
    plain = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    said = ""
    for more in ({}, {"PYTHONUTF8": "1"}):
        done = support.run(
            [sys.executable, "-c", code, "caf\u00e9"],
            env=plain | more | {"PYTHONPATH": str(support.ROOT)},
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        said, before = done.stdout, said
    assert "PYTHONUTF8=1" in before and said == ""


def test_numbers_of_another_type_as_the_error_advises():
    from flax import nnx

    gla: Any = mixers.load("gla")
    mixer = gla(16, heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"instead of (?P<dtype>float32)") as error:
        mixer(jnp.zeros((1, 4, 16), jnp.int32))
    match = re.search(r"instead of (\w+)", str(error.value))
    assert match
    jax.eval_shape(mixer, jax.ShapeDtypeStruct((1, 4, 16), match[1]))


def test_a_directory_that_was_deleted_as_the_error_advises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match="change to another directory"):
        command_line._require_directory()
    monkeypatch.chdir(tmp_path)
    command_line._require_directory()


def test_a_moved_run_as_the_error_advises(tmp_path: Path):
    (tmp_path / "run").mkdir()
    with lock.locked(tmp_path / "run") as held:
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(UserError, match="--workdir=DIR"):
            held.check(reread=True)
    _locked("moved")(tmp_path)


def test_a_platform_without_devices_as_the_error_advises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command_line, "_has_devices", lambda: False)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(UserError, match=r"JAX_PLATFORMS=tpu .* Unset it"), command_line.explained():
        raise RuntimeError("no tpu")
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(RuntimeError, match="another"), command_line.explained():
        raise RuntimeError("another")


def test_a_package_that_is_missing_as_the_error_advises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(cli.COMMANDS, "niah", ("seqjax_no_such_package", ""))
    with pytest.raises(UserError, match=r"seqjax_no_such_package is not installed.*install it without --no-deps"):
        cli._module("niah")
    monkeypatch.setitem(sys.modules, "seqjax_no_such_package", types.ModuleType("installed"))
    assert cli._module("niah").__name__ == "installed"


# ------------------------------------------------------------------------------------- the settings in messages exist
def _messages() -> list[tuple[str, str]]:
    """Return the text of every `raise` and log call, with its place."""
    match = []
    for path in sorted((Path(seqjax.__file__).parent).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                words = [
                    c.value for c in ast.walk(node.exc) if isinstance(c, ast.Constant) and isinstance(c.value, str)
                ]
                match.append((f"{path.name}:{node.lineno}", "\0".join(words)))
    return match


def test_the_settings_in_messages_exist():
    keys = {key for mixer in ("transformer_pp", "top1_chunk") for key in _keys(presets.read_config(mixer).to_dict())}
    n = 0
    for where, text in _messages():
        for key in re.findall(r"config\.((?:model|data|train|optim|eval|checkpoint|log|mesh)(?:\.[a-z_]+)+)", text):
            n += 1
            assert key in keys or key.startswith("model.mixer"), f"{where}: there is no setting config.{key}"
    assert n > 100


def _keys(values: dict[str, Any], prefix: str = "") -> list[str]:
    match = []
    for key, value in values.items():
        match += [f"{prefix}{key}", *(_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else ())]
    return match
