"""The files of a run that is kept in a store: what is sent when, and what another machine finds."""

import json

import pytest

from seqjax import store
from seqjax.training import metrics, mirrors
from seqjax.training.mirrors import Mirror, readable


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Go to another machine, or back to one: `machine("b")`."""

    def go(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        mirrors._copies.clear()

    return go


@pytest.fixture
def moved(monkeypatch):
    """Names of the objects that were written or read."""
    names: list[str] = []
    write, download = store.write, store.download

    def listening(url, content):
        names.append(url.rpartition("run/")[2])
        write(url, content)

    def fetching(url, path):
        names.append(url.rpartition("run/")[2])
        download(url, path)

    monkeypatch.setattr(store, "write", listening)
    monkeypatch.setattr(store, "download", fetching)
    return names


def begin(url: str) -> Mirror:
    run = Mirror(url)
    run.pull()
    return run


def put(run: Mirror, **files: str) -> None:
    for name, text in files.items():
        path = run.directory / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def found(run: Mirror) -> dict[str, str]:
    paths = [path for path in run.directory.rglob("*") if path.is_file()]
    return {p.relative_to(run.directory).as_posix(): p.read_text() for p in paths}


def test_what_has_changed_is_sent(memory, moved):
    run = begin(f"{memory}/run")
    put(run, config_json="{}", metrics="1\n", eval__7="x")
    put(run, checkpoints__5__w="x", **{"run.lock": "me", ".metrics.1.tmp": "half"})
    run.push()
    assert sorted(moved) == ["config.json", "eval/7", "metrics"]
    moved.clear()
    run.push()
    assert moved == []
    put(run, metrics="1\n2\n")
    (run.directory / "eval" / "7").unlink()
    run.push()
    assert moved == ["metrics"]
    assert store.sizes(str(run)).keys() == {"config.json", "metrics"}
    assert store.read(f"{run}/metrics") == b"1\n2\n"


def test_a_local_workdir_is_its_own_directory(tmp_path, moved):
    run = Mirror(tmp_path / "run")
    put(run, config_json="{}")
    run.pull()
    run.push()
    assert (str(run), moved, list(found(run))) == (str(tmp_path / "run"), [], ["config.json"])
    assert readable(tmp_path / "run") == tmp_path / "run"


def test_another_machine_finds_it_all_and_the_store_decides(memory, machine, moved):
    machine("a")
    run = begin(f"{memory}/run")
    put(run, config_json="{}", metrics="1\n2\n", eval__7="x")
    run.push()
    machine("b")
    other = begin(f"{memory}/run")
    assert other.directory != run.directory
    assert found(other) == found(run)
    moved.clear()
    other.push()
    assert moved == []
    put(other, metrics="1\n3\n")
    other.push()
    machine("a")  # which has older files, and rows that no checkpoint counts on
    put(run, metrics="1\n2\n2.5\n", eval__14="x")
    assert found(begin(f"{memory}/run")) == {"config.json": "{}", "metrics": "1\n3\n", "eval/7": "x"}


def test_a_run_that_was_deleted_in_the_store_does_not_come_back(memory):
    """But for the log of the process that starts the new one, which is being written."""
    run = begin(f"{memory}/run")
    put(run, config_json='{"old": 1}', **{"log.txt": "of then"})
    run.push()
    for name in store.sizes(run.url):
        store.remove(f"{run.url}/{name}")
    put(run, **{"log.txt": "of now"})
    new = begin(run.url)
    assert found(new) == {"log.txt": "of now"}
    new.push()
    assert begin(run.url).directory.joinpath("log.txt").read_text() == "of now"


def test_checkpoints_of_nobody_are_refused(memory):
    store.write(f"{memory}/run/checkpoints/5/params/w", b"1")
    with pytest.raises(store.UserError, match=f"{memory}/run has checkpoints but no config.json"):
        Mirror(f"{memory}/run").pull()


def test_a_reader_has_a_copy_of_its_own(memory, moved):
    run = begin(f"{memory}/run")
    put(run, config_json="{}", **{"metrics.jsonl": '{"step": 1}\n'}, tensorboard__events="many", eval__7="x")
    run.push()
    put(run, **{"metrics.jsonl": '{"step": 1}\n{"step": 2}\n'})
    assert metrics.read(run.url) == [{"step": 1}]
    assert found(run)["metrics.jsonl"].count("\n") == 2
    copy = readable(run.url)
    assert {path.name for path in copy.iterdir()} == {"config.json", "metrics.jsonl", "eval"}
    (run.directory / "eval" / "7").unlink()
    run.push()
    assert readable(run.url, fresh_seconds=60) == copy
    assert (copy / "metrics.jsonl").read_text().count("\n") == 1  # It was looked at a moment ago.
    moved.clear()
    assert metrics.read(run.url) == [{"step": 1}, {"step": 2}]
    assert moved == ["metrics.jsonl"], "what has not changed is not fetched again"
    assert not (copy / "eval" / "7").exists()
    store.write(f"{run.url}/evaluation.json", b'{"loss": 1}')
    assert json.loads((readable(run.url) / "evaluation.json").read_text()) == {"loss": 1}


def test_a_store_that_is_away_is_told_and_made_up_for(memory, monkeypatch):
    run, said = begin(f"{memory}/run"), []
    put(run, config_json="{}")
    fs, _ = store.filesystem(memory)
    with monkeypatch.context() as away:
        away.setattr(fs, "pipe_file", lambda *args: (_ for _ in ()).throw(ConnectionError("gone")))
        run.push(say=said.append)
        with pytest.raises(store.UserError, match=r"gone.*The same command goes on from the last checkpoint"):
            run.push()
    assert "cannot be reached (ConnectionError: gone)" in said[0]
    run.push()
    assert "config.json" in store.sizes(run.url)
