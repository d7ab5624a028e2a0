"""Workdirs from strangers: reading commands run none of their code, never block and write nowhere else."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorstore

import seqjax
from seqjax.commands import cli, evaluate, generate, train
from seqjax.convert import __main__ as convert
from seqjax.errors import UserError
from seqjax.evals import niah
from seqjax.training import checksums, loop
from tests import support
from tests.end_to_end.conftest import Run

CONFIG = "--config=transformer_pp:debug,train.batch_size=8"
LIMIT_SECONDS = 60  # far above the time of a refusal; a command that waits for a pipe would never end


@pytest.fixture
def workdir(rough: Run, tmp_path) -> Path:
    shutil.copytree(rough.workdir, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def outside(tmp_path) -> Iterator[Path]:
    """Return a user's directory, which must not change."""
    (tmp_path / "outside" / "4").mkdir(parents=True)
    for name in ("a.txt", "00000009.npz", f".a.{'0' * 32}.tmp", "4/a"):
        (tmp_path / "outside" / name).write_text("mine")
    before = files(tmp_path / "outside")
    yield tmp_path / "outside"
    assert files(tmp_path / "outside") == before


def files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def late(number, frame):
        raise AssertionError(f"still running after {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def commands(workdir: Path) -> dict:
    of_run = f"--workdir={workdir}"
    return {
        "generate": lambda: generate.main([of_run, "--prompt=a", "--max_new_tokens=1"]),
        "evaluate": lambda: evaluate.main([of_run, "--tokens=64"]),
        "export": lambda: convert.main(["export", of_run, f"--out={workdir.parent / 'out'}"]),
        "load": lambda: seqjax.load(workdir),
        "init_from": lambda: train.main([CONFIG, f"--init_from={workdir}", f"--workdir={workdir.parent / 'new'}"]),
    }


def change(workdir: Path, **values) -> None:
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    for key, value in values.items():
        group, _, name = key.partition("__")
        config[group][name] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("command", ["generate", "evaluate", "export", "load", "init_from"])
@pytest.mark.parametrize("what", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_config_that_blocks_is_refused(workdir, command, what):
    (workdir / "config.json").unlink()
    what(workdir / "config.json")
    with in_time(), pytest.raises(UserError, match=r"config\.json .*pipe .*device"):
        commands(workdir)[command]()


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "params/_METADATA", "params/d/new", "checksums.json", "new"])
def test_a_checkpoint_with_a_pipe_or_a_link(workdir, outside, name):
    path = workdir / "checkpoints" / "7" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with in_time(), pytest.raises(UserError, match=f"{name} .*link, .*pipe"):
        seqjax.load(workdir)
    path.unlink()
    path.symlink_to(outside / "a.txt")
    with pytest.raises(UserError, match=f"{name} .*link, .*pipe"):
        seqjax.load(workdir)


@pytest.mark.parametrize("name", [f"params/{'../' * 20}dev/zero", "params//dev/zero", "params/\x1b[2J"])
def test_checksums_name_files_of_the_checkpoint(workdir, name):
    path = workdir / "checkpoints" / "7" / "checksums.json"
    path.write_text(json.dumps({"crc32": json.loads(path.read_text())["crc32"] | {name: [4, 1]}}))
    with in_time(), pytest.raises(UserError, match=r"checksums\.json names") as caught:
        seqjax.load(workdir)
    assert str(caught.value).isprintable()


def test_chunks_are_not_larger_than_their_array(workdir):
    """A chunk of zeros has a few bytes on disk, but is unpacked completely."""
    step = workdir / "checkpoints" / "7"
    stored = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{step / 'params'}/"}).result()
    name = next(key for key in stored.list().result() if key.endswith(b"mlp.gate.w/.zarray"))
    described = json.loads(stored.read(name).result().value)
    stored.write(name, json.dumps(described | {"chunks": [1, 1 << 12, 1 << 12]}).encode()).result()
    checksums.write_checksums(step)
    with pytest.raises(UserError, match=r"mlp\.gate\.w \[.*\] .*chunks of \[1, 4096, 4096\]"):
        seqjax.load(workdir)


def test_results_do_not_follow_links(workdir, outside):
    """A result replaces the link."""
    (workdir / "evaluation.json").unlink(missing_ok=True)  # of another test
    (workdir / "evaluation.json").symlink_to(outside / "a.txt")
    (workdir / "niah.json").symlink_to(outside / "new")
    commands(workdir)["evaluate"]()
    niah.save(workdir / "niah.json", {"lengths": {}})
    assert json.loads((workdir / "evaluation.json").read_text())["step"] == 7
    assert not (workdir / "evaluation.json").is_symlink() and not (workdir / "niah.json").is_symlink()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"data__path": "reference://::/tmp/x.json"}, "scheme reference "),
        ({"data__path": "zip://a::dask://host:1"}, "scheme dask "),
        ({"data__path": "/dev"}, r"/dev has no manifest\.json"),
        ({"data__path": "https://user:pw@localhost:1/x"}, r"https://\*\*\*@localhost:1/x"),
        ({"eval__batch_size": 10**9}, "268,435,456 tokens"),
        ({"model__n_layers": 10**9}, r"config\.model\.n_layers .* 10001, "),
        ({"model__vocab_size": 10**12}, r"config\.model\.vocab_size must be"),
        ({"model__mixer": {"name": "evil_module.mixer"}}, r"--allow-code=evil_module\.mixer\b"),
    ],
    ids=str,
)
def test_a_config_with_absurd_values_is_refused(workdir, values, says, monkeypatch):
    monkeypatch.setattr("seqjax.store.RETRY_SECONDS", ())
    change(workdir, **values)
    with in_time(), pytest.raises(UserError, match=says) as caught:
        commands(workdir)["evaluate"]()
    assert "pw" not in str(caught.value)
    assert "evil_module" not in sys.modules


def test_an_evaluation_writes_no_cache_where_the_config_says(workdir, outside, corpus_cache, monkeypatch):
    change(workdir, data__corpus="builtin", data__path="", data__cache_dir=str(outside / "new"), eval__path=[])
    monkeypatch.setenv("XDG_CACHE_HOME", str(workdir.parent / "cache"))
    (workdir.parent / "cache").mkdir()
    (workdir.parent / "cache" / "seqjax").symlink_to(corpus_cache)  # already contains the built-in corpus
    commands(workdir)["evaluate"]()
    assert not (outside / "new").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "eval_losses", "ends"])
def test_training_writes_only_in_its_workdir(config, workdir, outside, name):
    if (workdir / name).exists():
        shutil.rmtree(workdir / name)
    (workdir / name).symlink_to(outside / ("a.txt" if "." in name else ""))
    with pytest.raises(UserError, match=f"/{name} .*link .*/outside"):
        loop.train(config, workdir)
    assert not (workdir / "run.lock").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["train", CONFIG, "--workdir="],
        ["train", CONFIG, "--workdir=", "--dry_run"],
        ["train", CONFIG, "--workdir=new", "--init_from="],
        ["evaluate", "--workdir="],
        ["generate", "--workdir="],
        ["repeats", "--workdir=", "--lengths=64"],
        ["niah", "--workdir=", "--lengths=64"],
        ["convert", "import", "--weights=", "--workdir=new"],
        ["convert", "import", "--weights=a", "--workdir="],
        ["convert", "export", "--workdir=a", "--out="],
        ["recall", "--size=demo", "--out=", "--report"],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_current_directory(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.run(argv)
    assert caught.value.code == 2
    assert re.search(r"empty.*`\.`", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_refused_run_deletes_nothing(workdir):
    """All checks come first; after them only the run's own files are removed."""
    kept = [workdir / name for name in (f".a.{'0' * 32}.tmp", f"notes/.a.{'0' * 32}.tmp", ".a.tmp")]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    argv = [CONFIG, f"--workdir={workdir}", "--config.train.steps=1"]
    with pytest.raises(UserError, match="another config"):
        train.main(argv)
    (workdir / "config.json").unlink()
    with pytest.raises(UserError, match=r"/run .*checkpoints .*no config\.json"):
        train.main(argv)
    assert all(path.exists() for path in kept)


@pytest.mark.slow  # another process
@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_modules_in_the_current_directory_are_not_imported(workdir, command):
    """Missing packages, and plugins that JAX looks for, would be imported from the stranger's directory."""
    modules = ("jax_plugins/evil/__init__.py", "gcsfs.py", "tokenizers.py", "evil.py")
    written = {
        **dict.fromkeys(modules, "raise SystemExit('ran')"),
        "evil-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
        "evil-1.dist-info/entry_points.txt": "[jax_plugins]\nevil = evil\n[fsspec.specs]\na = evil:A\n",
    }
    for name, text in written.items():
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text(text)
    env = support.environment() | {"PYTHONPATH": str(support.ROOT)}
    more = {"generate": "--max_new_tokens=2", "evaluate": "--tokens=64"}[command]
    args = [sys.executable, "-P", "-m", "seqjax", command, "--workdir=.", more]
    done = support.run(args, cwd=workdir, env=env)
    assert (done.returncode, "ran" in done.stderr) == (0, False), done.stderr
