"""Whole checkpoints in a store that Orbax does not write to: there when they are complete, and else not at all."""

import contextlib
import shutil

import numpy as np
import pytest

from seqjax import store
from seqjax.errors import UserError
from seqjax.training import integrity, stored_checkpoints
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.spool import Spool
from seqjax.training.stored_checkpoints import DIRECTORY, MARKER
from tests import object_servers

FILES = {"_CHECKPOINT_METADATA": b"{}", "params/w": b"12345", "params/empty": b"", "rest/mu": b"1" * 1000}


@pytest.fixture
def workdir(tmp_path):
    for step in (5, 10):
        for name, content in {**FILES, MARKER: b"%d" % step}.items():
            path = tmp_path / "run" / DIRECTORY / str(step) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return tmp_path / "run"


def steps(url: str) -> list[int]:
    return stored_checkpoints.complete(store.sizes(url))


def test_it_comes_back_as_it_was(memory, workdir, tmp_path):
    stored_checkpoints.send(workdir, memory, 5)
    assert steps(memory) == [5]
    stored_checkpoints.fetch(memory, 5, tmp_path / "other")
    got = tmp_path / "other" / DIRECTORY / "5"
    assert {name: (got / name).read_bytes() for name in FILES} == FILES
    stored_checkpoints.fetch(memory, 5, tmp_path / "part", items=("params",))
    assert {p.name for p in (tmp_path / "part" / DIRECTORY / "5").iterdir()} == {
        "_CHECKPOINT_METADATA",
        MARKER,
        "params",
    }
    assert [path.name for path in (tmp_path / "part").iterdir()] == [DIRECTORY]


@pytest.mark.parametrize("after", range(len(FILES) + 1))
def test_however_far_it_got_the_one_before_is_in_force(memory, workdir, monkeypatch, after, tmp_path):
    """The line dies after so many files, the marker is the last; the next attempt is whole and leaves nothing over."""
    stored_checkpoints.send(workdir, memory, 5)
    monkeypatch.setattr(store, "THREADS", 1)
    uploaded: list[str] = []
    upload = store.upload

    def dies(path, url):
        if len(uploaded) == after:
            raise store.StoreError("dead")
        uploaded.append(url)
        upload(path, url)

    with monkeypatch.context() as patch:
        patch.setattr(store, "upload", dies)
        with pytest.raises(store.StoreError, match="dead"):
            stored_checkpoints.send(workdir, memory, 10)
    assert len(uploaded) == after
    assert steps(memory) == [5]
    stored_checkpoints.fetch_newest(memory, tmp_path / "reader", items=("params",))
    assert stored_checkpoints.local_steps(tmp_path / "reader") == [5]
    store.write(f"{memory}/{DIRECTORY}/10/params/of_another_attempt", b"x")
    stored_checkpoints.send(workdir, memory, 10)
    assert steps(memory) == [5, 10]
    assert store.sizes(f"{memory}/{DIRECTORY}/10").keys() == {*FILES, MARKER}


def test_one_that_is_sent_again_does_not_exist_meanwhile(memory, workdir, monkeypatch):
    stored_checkpoints.send(workdir, memory, 5)
    with monkeypatch.context() as patch:
        patch.setattr(store, "upload", lambda path, url: (_ for _ in ()).throw(store.StoreError("dead")))
        with pytest.raises(store.StoreError):
            stored_checkpoints.send(workdir, memory, 5)
    assert steps(memory) == []


def test_files_that_did_not_arrive_are_missed(memory, workdir, monkeypatch):
    upload = store.upload
    monkeypatch.setattr(store, "upload", lambda path, url: None if path.name == "mu" else upload(path, url))
    with pytest.raises(store.StoreError, match="lacks rest/mu although it was sent"):
        stored_checkpoints.send(workdir, memory, 5)
    assert steps(memory) == []


def test_pruning(memory, workdir):
    for step in (5, 10, 15, 20, 25):
        if step > 10:
            shutil.copytree(workdir / DIRECTORY / "10", workdir / DIRECTORY / str(step))
        stored_checkpoints.send(workdir, memory, step)
    store.write(f"{memory}/{DIRECTORY}/23/params/w", b"of a process that died")
    store.write(f"{memory}/config.json", b"{}")
    stored_checkpoints.prune(memory, keep=2, keep_period=10)
    assert steps(memory) == [10, 20, 25]
    assert {name.split("/")[1] for name in store.sizes(memory) if "/" in name} == {"10", "20", "25"}
    assert "config.json" in store.sizes(memory)


def test_a_reader_takes_the_next_when_one_is_removed(memory, workdir, tmp_path, monkeypatch):
    stored_checkpoints.send(workdir, memory, 5)
    fetch, calls = stored_checkpoints.fetch, []

    def late(url, step, target, *, items):
        if not calls:
            stored_checkpoints.send(workdir, memory, 10)
            stored_checkpoints.prune(memory, keep=1, keep_period=None)
            calls.append(step)
            raise store.StoreError("no such object")
        fetch(url, step, target, items=items)

    monkeypatch.setattr(stored_checkpoints, "fetch", late)
    stored_checkpoints.fetch_newest(memory, tmp_path / "reader", items=("params",))
    assert (calls, stored_checkpoints.local_steps(tmp_path / "reader")) == ([5], [10])


# ------------------------------------------------------------------------------------------------- as a run saves them
def params(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(3, step, np.float32)}


@pytest.fixture
def away(memory, monkeypatch):
    """A context in which no object can be written."""

    @contextlib.contextmanager
    def context():
        with monkeypatch.context() as patch:
            fs, _ = store.filesystem(memory)
            for name in ("put_file", "pipe_file"):
                patch.setattr(fs, name, lambda *args: (_ for _ in ()).throw(ConnectionError("gone")))
            yield

    return context


def test_the_newest_stay_and_those_of_the_period(memory):
    checkpoints = Checkpoints(f"{memory}/run", keep=1, keep_period=2)
    for step in (1, 2, 3):
        checkpoints.save_params(step, params(step))
    checkpoints.wait()
    checkpoints.close()
    assert steps(f"{memory}/run") == [2, 3]
    assert stored_checkpoints.local_steps(Spool(f"{memory}/run").directory) == [3]
    reader = Checkpoints(f"{memory}/run", read_only=True)
    got, step = reader.restore_params(params(0))
    reader.close()
    assert (step, got["w"].tolist()) == (3, [3, 3, 3])


def test_a_store_that_was_away_has_the_next_one(memory, away, caplog):
    checkpoints = Checkpoints(f"{memory}/run", keep=2)
    checkpoints.save_params(1, params(1))
    checkpoints.wait()
    with away():
        checkpoints.save_params(2, params(2))
        with contextlib.suppress(store.StoreError):
            checkpoints._copies.wait()
    checkpoints.save_params(3, params(3))
    checkpoints.wait()
    checkpoints.close()
    assert "gone). Check the network" in caplog.text
    assert "the next one is sent" in caplog.text
    assert steps(f"{memory}/run") == [1, 3]


def test_a_store_that_stays_away_loses_nothing(memory, away):
    """The end of the run says where everything is, and the next start sends it."""
    url = f"{memory}/run"
    checkpoints = Checkpoints(url, keep=2)
    checkpoints.save_params(1, params(1))
    checkpoints.wait()
    here = Spool(url).directory
    with away():
        for step in (2, 3):
            checkpoints.save_params(step, params(step))
        with pytest.raises(UserError, match=rf"gone.*checkpoint of step 3 and all files are in {here}: the same comm"):
            checkpoints.wait()
        checkpoints.close()
    assert steps(url) == [1]
    assert integrity.is_whole(here / DIRECTORY / "3", integrity.PARAMS)
    checkpoints = Checkpoints(url, keep=2)
    checkpoints.wait()
    checkpoints.close()
    assert steps(url) == [1, 3]


def test_a_damaged_copy_names_the_copy_and_what_it_is_of(memory):
    url = f"{memory}/run"
    checkpoints = Checkpoints(url)
    checkpoints.save_params(1, params(1))
    checkpoints.wait()
    checkpoints.close()
    for name in store.sizes(f"{url}/{DIRECTORY}/1/params/d"):
        store.write(f"{url}/{DIRECTORY}/1/params/d/{name}", b"damaged")
    reader = Checkpoints(url, read_only=True)
    with pytest.raises(UserError, match=rf"/runs/.*/1 is damaged.*It is a copy of {url}/checkpoints/1"):
        reader.restore_params(params(0))
    reader.close()


def test_orbax_writes_to_gs_itself(own_cache, gcs_server):
    """What another process adds and removes is seen, without checksums of our own: the store has some."""
    with object_servers.used(gcs_server):
        url = f"{gcs_server.url}/orbax/run"
        checkpoints = Checkpoints(url, keep=1)
        for step in (1, 2):
            checkpoints.save_params(step, params(step))
        checkpoints.wait()
        checkpoints.close()
        assert {name.split("/")[0] for name in store.sizes(f"{url}/{DIRECTORY}")} == {"2"}
        assert MARKER not in {name.rpartition("/")[2] for name in store.sizes(url)}
        assert stored_checkpoints.local_steps(Spool(url).directory) == []
        reader = Checkpoints(url, read_only=True)
        assert reader.restore_params(params(0))[1] == 2
        for name in store.sizes(f"{url}/{DIRECTORY}/2"):
            store.write(f"{url}/{DIRECTORY}/3/{name}", store.read(f"{url}/{DIRECTORY}/2/{name}"))
            store.remove(f"{url}/{DIRECTORY}/2/{name}")
        got, step = reader.restore_params(params(0))
        reader.close()
        assert (step, got["w"].tolist()) == (3, [2, 2, 2])
        with pytest.raises(UserError, match=rf"{gcs_server.url}/none/checkpoints holds no complete"):
            Checkpoints(f"{gcs_server.url}/none", read_only=True).restore_params(params(0))


def test_without_a_checkpoint_the_store_is_named(memory):
    store.write(f"{memory}/run/config.json", b"{}")
    reader = Checkpoints(f"{memory}/run", read_only=True)
    with pytest.raises(UserError, match=rf"{memory}/run/checkpoints holds no complete checkpoint"):
        reader.restore_params(params(0))
    reader.close()
