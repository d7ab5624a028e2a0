"""A run in a store: which files are copied when, and their content on another machine."""

import json

import pytest

from seqjax import store
from seqjax.training import metrics, mirrors
from seqjax.training.mirrors import Mirror, readable


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that switches between machines, each with a separate cache: `machine("b")`."""

    def switch(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        mirrors._copies.clear()

    return switch


@pytest.fixture
def transfers(monkeypatch):
    """Record the names of objects that are written to or read from the store."""
    names: list[str] = []
    write, download = store.write, store.download

    def recording_write(url, content):
        names.append(url.rpartition("run/")[2])
        write(url, content)

    def recording_download(url, path):
        names.append(url.rpartition("run/")[2])
        download(url, path)

    monkeypatch.setattr(store, "write", recording_write)
    monkeypatch.setattr(store, "download", recording_download)
    return names


def begin(url: str) -> Mirror:
    run = Mirror(url)
    run.pull()
    return run


def put_files(run: Mirror, **files: str) -> None:
    for name, text in files.items():
        path = run.directory / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def contents(run: Mirror) -> dict[str, str]:
    paths = [path for path in run.directory.rglob("*") if path.is_file()]
    return {p.relative_to(run.directory).as_posix(): p.read_text() for p in paths}


def test_push_sends_only_changes(memory, transfers):
    run = begin(f"{memory}/run")
    put_files(run, config_json="{}", metrics="1\n", eval__7="x")
    put_files(run, checkpoints__5__w="x", **{"run.lock": "me", ".metrics.1.tmp": "half"})
    run.push()
    assert sorted(transfers) == ["config.json", "eval/7", "metrics"]
    transfers.clear()
    run.push()
    assert transfers == []
    put_files(run, metrics="1\n2\n")
    (run.directory / "eval" / "7").unlink()
    run.push()
    assert transfers == ["metrics"]
    assert store.sizes(str(run)).keys() == {"config.json", "metrics"}
    assert store.read(f"{run}/metrics") == b"1\n2\n"


def test_local_workdir_has_no_copy(tmp_path, transfers):
    run = Mirror(tmp_path / "run")
    put_files(run, config_json="{}")
    run.pull()
    run.push()
    assert (str(run), transfers, list(contents(run))) == (str(tmp_path / "run"), [], ["config.json"])
    assert readable(tmp_path / "run") == tmp_path / "run"


def test_store_overrides_local_copies(memory, machine, transfers):
    machine("a")
    run = begin(f"{memory}/run")
    put_files(run, config_json="{}", metrics="1\n2\n", eval__7="x")
    run.push()
    machine("b")
    other = begin(f"{memory}/run")
    assert other.directory != run.directory
    assert contents(other) == contents(run)
    transfers.clear()
    other.push()
    assert transfers == []
    put_files(other, metrics="1\n3\n")
    other.push()
    machine("a")  # its older files and unsaved rows are replaced
    put_files(run, metrics="1\n2\n2.5\n", eval__14="x")
    assert contents(begin(f"{memory}/run")) == {"config.json": "{}", "metrics": "1\n3\n", "eval/7": "x"}


def test_run_deleted_in_the_store_stays_deleted(memory):
    """Only log.txt stays, because the process that starts the new run is writing it."""
    run = begin(f"{memory}/run")
    put_files(run, config_json='{"old": 1}', **{"log.txt": "of then"})
    run.push()
    for name in store.sizes(run.url):
        store.remove(f"{run.url}/{name}")
    put_files(run, **{"log.txt": "of now"})
    new = begin(run.url)
    assert contents(new) == {"log.txt": "of now"}
    new.push()
    assert begin(run.url).directory.joinpath("log.txt").read_text() == "of now"


def test_checkpoints_without_config_are_rejected(memory):
    store.write(f"{memory}/run/checkpoints/5/params/w", b"1")
    with pytest.raises(store.UserError, match=f"{memory}/run .*checkpoints .*no config.json"):
        Mirror(f"{memory}/run").pull()


def test_reader_uses_a_separate_copy(memory, transfers):
    run = begin(f"{memory}/run")
    put_files(run, config_json="{}", **{"metrics.jsonl": '{"step": 1}\n'}, tensorboard__events="many", eval__7="x")
    run.push()
    put_files(run, **{"metrics.jsonl": '{"step": 1}\n{"step": 2}\n'})
    assert metrics.read(run.url) == [{"step": 1}]
    assert contents(run)["metrics.jsonl"].count("\n") == 2
    copy = readable(run.url)
    assert {path.name for path in copy.iterdir()} == {"config.json", "metrics.jsonl", "eval"}
    (run.directory / "eval" / "7").unlink()
    run.push()
    assert readable(run.url, fresh_seconds=60) == copy
    assert (copy / "metrics.jsonl").read_text().count("\n") == 1  # the copy is recent, so it is reused
    transfers.clear()
    assert metrics.read(run.url) == [{"step": 1}, {"step": 2}]
    assert transfers == ["metrics.jsonl"], "unchanged files are not downloaded again"
    assert not (copy / "eval" / "7").exists()
    store.write(f"{run.url}/evaluation.json", b'{"loss": 1}')
    assert json.loads((readable(run.url) / "evaluation.json").read_text()) == {"loss": 1}


def test_push_reports_store_outage_and_catches_up(memory, monkeypatch):
    run, errors = begin(f"{memory}/run"), []
    put_files(run, config_json="{}")
    fs, _ = store.filesystem(memory)
    with monkeypatch.context() as outage:
        outage.setattr(fs, "pipe_file", lambda *args: (_ for _ in ()).throw(ConnectionError("gone")))
        run.push(on_error=errors.append)
        with pytest.raises(store.UserError, match=f"{run.url}.*ConnectionError: gone"):
            run.push()
    assert run.url in errors[0] and "ConnectionError: gone" in errors[0]
    run.push()
    assert "config.json" in store.sizes(run.url)
