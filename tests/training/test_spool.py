"""The files of a run that is kept in a store: what is sent when, and what another machine finds."""

import json

import pytest

from seqjax import store
from seqjax.training import metrics, spool, stored_checkpoints
from seqjax.training.spool import Spool, readable


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Go to another machine, or back to one: `machine("b")`."""

    def go(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        spool._read.clear()

    return go


@pytest.fixture
def sent(monkeypatch):
    """Names of the objects that were written."""
    names: list[str] = []
    write = store.write

    def listening(url, content):
        names.append(url.rpartition("run/")[2])
        write(url, content)

    monkeypatch.setattr(store, "write", listening)
    return names


def begin(url: str) -> Spool:
    run = Spool(url)
    run.directory.mkdir(parents=True, exist_ok=True)
    run.pull(pytest.fail)
    return run


def put(run: Spool, **files: str) -> None:
    for name, text in files.items():
        path = run.directory / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def checkpoint(run: Spool, step: int) -> None:
    put(run, **{f"checkpoints__{step}__params__w": f"weights {step}", f"checkpoints__{step}__checksums_json": "{}"})


def found(run: Spool) -> dict[str, str]:
    paths = [path for path in run.directory.rglob("*") if path.is_file()]
    return {p.relative_to(run.directory).as_posix(): p.read_text() for p in paths if p.name != spool.IDENTITY}


def test_what_has_changed_is_sent(memory, sent):
    run = begin(f"{memory}/run")
    put(run, config_json="{}", metrics="1\n", eval__7="x")
    put(run, checkpoints__5__w="x", **{"run.lock": "me", ".metrics.1.tmp": "half"})
    run.push()
    assert sorted(sent) == ["config.json", "eval/7", "metrics", spool.IDENTITY]
    sent.clear()
    run.push()
    assert sent == []
    put(run, metrics="1\n2\n")
    (run.directory / "eval" / "7").unlink()
    run.push()
    assert sent == ["metrics"]
    assert store.sizes(str(run)).keys() == {"config.json", "metrics", spool.IDENTITY}
    assert store.read(f"{run}/metrics") == b"1\n2\n"


def test_a_local_workdir_is_its_own_directory(tmp_path, sent):
    run = Spool(tmp_path / "run")
    put(run, config_json="{}")
    run.pull(pytest.fail)
    run.push()
    assert (str(run), sent, list(found(run))) == (str(tmp_path / "run"), [], ["config.json"])
    assert readable(tmp_path / "run") == tmp_path / "run"


def test_another_machine_finds_it_all(memory, machine):
    machine("a")
    run = begin(f"{memory}/run")
    put(run, config_json="{}", metrics="1\n2\n")
    run.push()
    for step in (5, 10):
        checkpoint(run, step)
        stored_checkpoints.send(run.directory, run.url, step)
    wanted = found(run)
    machine("b")
    other = begin(f"{memory}/run")
    assert other.directory != run.directory
    assert found(other) == {name: text for name, text in wanted.items() if "/5/" not in name}
    put(other, metrics="1\n3\n")
    checkpoint(other, 15)
    other.push()
    stored_checkpoints.send(other.directory, other.url, 15)
    machine("a")  # which has older files, and rows that no checkpoint counts on
    put(run, metrics="1\n2\n2.5\n")
    again = begin(f"{memory}/run")
    assert found(again)["metrics"] == "1\n3\n"
    assert stored_checkpoints.local_steps(again.directory) == [5, 10, 15]


def test_a_machine_that_was_cut_off_goes_on_with_what_it_has(memory):
    run = begin(f"{memory}/run")
    put(run, config_json="{}", metrics="1\n")
    run.push()
    checkpoint(run, 5)
    stored_checkpoints.send(run.directory, run.url, 5)
    checkpoint(run, 10)  # and now the store is away
    put(run, metrics="1\n2\n")
    again, said = Spool(run.url), []
    again.pull(said.append)
    assert found(again)["metrics"] == "1\n2\n"
    assert "holds the checkpoint of step 10, which did not reach memory://" in said[0]
    again.push()
    assert store.read(f"{run.url}/metrics") == b"1\n2\n"


def test_a_run_that_was_deleted_in_the_store_does_not_come_back(memory):
    run = begin(f"{memory}/run")
    put(run, config_json='{"old": 1}', **{"log.txt": "of now"})
    run.push()
    checkpoint(run, 5)
    for name in store.sizes(run.url):
        store.remove(f"{run.url}/{name}")
    new, said = Spool(run.url), []
    new.pull(said.append)
    assert found(new) == {"log.txt": "of now"}
    aside = said[0].split()[-1]
    assert json.loads((run.directory.parent / aside / "config.json").read_text()) == {"old": 1}
    put(new, config_json='{"new": 1}')
    new.push()
    begin(run.url)  # the same one now


def test_checkpoints_of_nobody_are_refused(memory):
    store.write(f"{memory}/run/checkpoints/5/params/w", b"1")
    with pytest.raises(store.UserError, match=f"{memory}/run has checkpoints but no config.json"):
        Spool(f"{memory}/run").pull(pytest.fail)


def test_a_reader_has_a_copy_of_its_own(memory):
    run = begin(f"{memory}/run")
    put(run, config_json="{}", **{"metrics.jsonl": '{"step": 1}\n'}, tensorboard__events="many")
    checkpoint(run, 5)
    run.push()
    put(run, **{"metrics.jsonl": '{"step": 1}\n{"step": 2}\n'})
    assert metrics.read(run.url) == [{"step": 1}]
    assert found(run)["metrics.jsonl"].count("\n") == 2
    copy = readable(run.url)
    assert {path.name for path in copy.iterdir()} == {"config.json", "metrics.jsonl", spool.IDENTITY}
    run.push()
    assert readable(run.url, fresh_seconds=60) == copy
    assert (copy / "metrics.jsonl").read_text().count("\n") == 1  # it was looked at a moment ago
    assert metrics.read(run.url) == [{"step": 1}, {"step": 2}]
    spool.write_result(run.url, "evaluation.json", {"loss": 1})
    assert json.loads((readable(run.url) / "evaluation.json").read_text()) == {"loss": 1}


def test_a_store_that_is_away_is_told_and_made_up_for(memory, monkeypatch):
    run, said = begin(f"{memory}/run"), []
    put(run, config_json="{}")
    fs, _ = store.filesystem(memory)
    with monkeypatch.context() as away:
        away.setattr(fs, "pipe_file", lambda *args: (_ for _ in ()).throw(ConnectionError("gone")))
        run.try_push(said.append)
        with pytest.raises(store.UserError, match=f"gone.*The files are in {run.directory}: the same command"):
            run.push_last()
    assert "cannot be reached (ConnectionError: gone)" in said[0]
    assert f"The files are in {run.directory} and are sent again later" in said[0]
    run.push()
    assert "config.json" in store.sizes(run.url)
