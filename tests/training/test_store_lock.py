"""One run at a time writes to a workdir in a store, as far as an object can say."""

import dataclasses
import datetime
import json
import os
import threading

import pytest

from seqjax import store
from seqjax.errors import UserError
from seqjax.training import lock, lock_holder, store_lock
from seqjax.training.lock_holder import Holder
from seqjax.training.store_lock import locked


def write_lock(url: str, **changes: object) -> None:
    values = dataclasses.asdict(Holder.of_this_process()) | {"host": "elsewhere", "pid": 7, "space": ""} | changes
    store.write(f"{url}/{lock.FILE}", json.dumps(values).encode())


@pytest.fixture
def another_machine(monkeypatch, tmp_path):
    """This machine's spool is not the other one's."""
    return lambda: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))


def test_the_second_is_refused_and_the_next_is_not(memory, another_machine):
    url = f"{memory}/run"
    with locked(url) as held:
        held.check(look=True)
        with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on "):
            locked(url).__enter__()  # by the lock of the spool
        another_machine()
        with pytest.raises(UserError, match=rf"^{url} is in use by process {os.getpid()} on "):
            locked(url).__enter__()
        assert store.sizes(url).keys() == {lock.FILE}
    assert store.sizes(url) == {}
    with locked(url):
        pass


def test_a_local_workdir_has_the_local_lock(tmp_path):
    with locked(tmp_path / "run") as held:
        assert isinstance(held, lock.WorkdirLock)
        assert (tmp_path / "run" / lock.FILE).is_file()


@pytest.mark.parametrize(("age", "refused"), [(0, True), (lock_holder.STALE_SECONDS + 10, False)])
def test_on_another_machine_the_age_decides(memory, monkeypatch, age, refused):
    url = f"{memory}/run"
    write_lock(url)
    modified = store.modified
    older = datetime.timedelta(seconds=age)
    monkeypatch.setattr(store, "modified", lambda name: modified(name) - older * name.endswith(lock.FILE))
    monkeypatch.setattr(store_lock, "SETTLE_SECONDS", 0.0)
    if refused:
        with pytest.raises(UserError, match=r"in use by process 7 on elsewhere.*if it is dead, try again in 1[78]\d s"):
            locked(url).__enter__()
    else:
        with locked(url):
            assert Holder(**json.loads(store.read(f"{url}/{lock.FILE}"))).pid == os.getpid()
    assert not any("." in name.removeprefix(lock.FILE) for name in store.sizes(url))  # no probe is left


@pytest.mark.parametrize("lives", [False, True])
def test_what_is_started_again_waits_for_a_sign_of_life(memory, monkeypatch, capsys, lives):
    url = f"{memory}/run"
    write_lock(url)
    monkeypatch.setattr(lock_holder, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(store_lock, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(store_lock, "SETTLE_SECONDS", 0.0)
    if lives:
        threading.Timer(0.1, lambda: write_lock(url)).start()
        with pytest.raises(UserError, match="in use by process 7 on elsewhere"):
            locked(url, wait=True).__enter__()
    else:
        with locked(url, wait=True) as held:
            held.check(look=True)
    assert f"{url} was left in use by process 7 on elsewhere; waiting up to 0 s" in capsys.readouterr().err


def test_a_dead_process_of_this_machine_is_known_at_once(memory, monkeypatch):
    url = f"{memory}/run"
    mine = Holder.of_this_process()
    write_lock(url, **(dataclasses.asdict(mine) | {"started": "another process of this pid"}))
    monkeypatch.setattr(store_lock, "SETTLE_SECONDS", 0.0)
    with locked(url):
        pass


def test_who_lost_it_ends(memory, monkeypatch):
    url = f"{memory}/run"
    with locked(url) as held:
        held.check()
        write_lock(url)
        held.check()  # has not looked
        with pytest.raises(UserError, match=r"was taken by process 7 on elsewhere.*did not reach the store"):
            held.check(look=True)
    assert store.sizes(url).keys() == {lock.FILE}  # the other one's stays


def test_the_beat_writes_it_anew_and_sees_another(memory, monkeypatch):
    url = f"{memory}/run"
    written = threading.Event()
    write = store_lock._write

    def listening(*args):
        write(*args)
        written.set()

    monkeypatch.setattr(store_lock, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(store_lock, "_write", listening)
    with locked(url) as held:
        assert written.wait(10)
        held.check()
        write_lock(url)
        held._thread.join(10)
        with pytest.raises(UserError, match="was taken by process 7"):
            held.check()
