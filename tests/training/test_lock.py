"""One run at a time writes to a workdir: who is refused, by whom, and how a dead run is told from a living one."""

import concurrent.futures
import contextlib
import datetime
import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from seqjax import store
from seqjax.errors import UserError
from seqjax.training import checkpoint, lock, mirrors
from seqjax.training import loop as train_module
from seqjax.training.lock import locked
from tests import support

HOLD = """
import sys, time
from seqjax.training.lock import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""
ELSEWHERE = {"host": "elsewhere", "pid": 7, "space": "", "started": "1", "since": "yesterday", "token": "other"}


def write_lock(workdir, age=0.0, **changes):
    """A lock of a process on another host that was touched `age` seconds ago."""
    path = workdir / lock.FILE
    path.write_text(json.dumps(ELSEWHERE | changes))
    then = time.time() - age
    os.utime(path, (then, then))


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock of `tmp_path / "run"`."""
    args = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, text=True, cwd=support.ROOT, env=support.environment())
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_second_is_refused_and_the_next_is_not(tmp_path):
    with locked(str(tmp_path / "new" / "run")):
        with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on {socket.gethostname()}, since 2"):
            locked(tmp_path / "new" / "run").__enter__()
        assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == [lock.FILE]
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "new" / "run"):
        raise ZeroDivisionError
    with locked(tmp_path / "new" / "run"):
        pass
    assert not any((tmp_path / "new" / "run").iterdir())


def test_another_process_is_named_and_when_killed_recognised_at_once(tmp_path, other):
    with pytest.raises(UserError, match=f"process {other.pid} on {socket.gethostname()}.*another --workdir"):
        locked(tmp_path / "run").__enter__()
    other.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while lock.start_time_of(other.pid) and time.monotonic() < deadline:  # not waited for: it stays as a zombie
        time.sleep(0.01)
    assert (tmp_path / "run" / lock.FILE).exists(), "it could not clean up"
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / lock.FILE).read_text())["pid"] == os.getpid()


def test_a_later_process_of_the_same_pid_is_another_one(tmp_path):
    """In a container that starts again, the pid of the killed run is that of the new one."""
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "space": lock.pid_space()}
    write_lock(tmp_path, **mine, started=lock.start_time_of(os.getpid()))
    with pytest.raises(UserError, match="in use by process"):
        locked(tmp_path).__enter__()
    write_lock(tmp_path, **mine, started="12345")
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("changes", [{}, {"host": socket.gethostname(), "space": "another container"}])
def test_on_another_host_the_age_decides(tmp_path, changes):
    write_lock(tmp_path, age=60, **changes)
    with pytest.raises(
        UserError, match=r"process 7 on .*, since yesterday.* 6\d s ago.*try again in 1[12]\d s"
    ) as caught:
        locked(tmp_path).__enter__()
    assert "another --workdir" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [lock.FILE], "nothing else is left behind"
    write_lock(tmp_path, age=lock.STALE_SECONDS + 10, **changes)
    with locked(tmp_path):
        pass
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("ends", ["released", "dead", "alive"])
def test_a_job_that_starts_again_waits_for_its_first_start(tmp_path, monkeypatch, capsys, ends):
    monkeypatch.setattr(lock, "LOOK_SECONDS", 0.02)
    write_lock(tmp_path, age=lock.STALE_SECONDS - (1 if ends == "dead" else 90))
    path = tmp_path / lock.FILE
    if ends != "dead":
        threading.Timer(0.2, path.unlink if ends == "released" else path.touch).start()
    if ends == "alive":
        with pytest.raises(UserError, match="in use by process 7 on elsewhere"):
            locked(tmp_path, wait=True).__enter__()
    else:
        with locked(tmp_path, wait=True):
            assert json.loads(path.read_text())["pid"] == os.getpid()
    seconds = "1|0" if ends == "dead" else "90|89"
    assert re.search(rf"left in use by process 7 on elsewhere; waiting up to ({seconds}) s", capsys.readouterr().err)


@pytest.mark.parametrize(("restarts", "processes"), [(None, 1), ("1", 1), (None, 2)])
def test_training_waits_if_a_scheduler_may_have_started_it_again(blocks_dir, monkeypatch, restarts, processes):
    asked = []

    def refuse(workdir, *, wait):
        asked.append(wait)
        raise UserError("in use")

    monkeypatch.setattr(mirrors, "locked", refuse)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    with pytest.raises(UserError, match="in use"):
        train_module.train(support.run_config(blocks_dir), "anywhere")
    assert asked == [restarts is not None or processes > 1]


def test_a_lock_that_is_being_written_holds(tmp_path):
    (tmp_path / lock.FILE).touch()
    with pytest.raises(UserError, match="in use by another process"):
        locked(tmp_path).__enter__()
    write_lock(tmp_path, age=lock.STALE_SECONDS + 10)
    os.truncate(tmp_path / lock.FILE, 5)
    os.utime(tmp_path / lock.FILE, (1, 1))
    with locked(tmp_path):
        pass


def test_of_many_that_find_a_dead_lock_one_gets_it(tmp_path):
    write_lock(tmp_path, age=10_000)

    def take(_):
        try:
            return lock._acquire(str(tmp_path))
        except UserError:
            return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = [holder for holder in pool.map(take, range(8)) if holder is not None]
    assert len(got) == 1
    assert json.loads((tmp_path / lock.FILE).read_text()) == got[0]._asdict()


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_living_run_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with locked(tmp_path) as held:
        path = tmp_path / lock.FILE
        os.utime(path, (1, 1))
        wait_until(lambda: path.stat().st_mtime > 1)
        held.check()


def test_a_heartbeat_may_miss_several_beats_before_a_lock_is_stale():
    assert 0 < lock.LOOK_SECONDS <= lock.BEAT_SECONDS <= lock.STALE_SECONDS / 4


def test_a_heartbeat_outlives_a_file_server_that_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    utime, failures = os.utime, []

    def away(*args, **options):
        if len(failures) < 3:
            failures.append(args)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        utime(*args, **options)

    with locked(tmp_path) as held:
        path = tmp_path / lock.FILE
        os.utime(path, (1, 1))
        monkeypatch.setattr(lock.os, "utime", away)
        wait_until(lambda: path.stat().st_mtime > 1)
        assert len(failures) == 3
        held.check(reread=True)


def test_a_living_run_out_of_sight_is_not_taken_over_and_a_silent_one_is(tmp_path, monkeypatch):
    """Its process cannot be seen, as on another host: the heartbeat alone keeps its lock."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lock, "STALE_SECONDS", 1.0)
    spaces = iter(map(str, range(1000)))
    monkeypatch.setattr(lock, "pid_space", lambda: next(spaces))
    with locked(tmp_path):
        time.sleep(1.2)
        with pytest.raises(UserError, match="in use by process"):
            locked(tmp_path).__enter__()
    write_lock(tmp_path, age=1.2)
    with locked(tmp_path):
        assert json.loads((tmp_path / lock.FILE).read_text())["pid"] == os.getpid()


def test_a_living_process_of_this_machine_keeps_a_stale_lock(tmp_path, other):
    """It may have been suspended."""
    path = tmp_path / "run" / lock.FILE
    then = time.time() - 10 * lock.STALE_SECONDS
    os.utime(path, (then, then))
    with pytest.raises(UserError, match=f"in use by process {other.pid}"):
        locked(tmp_path / "run").__enter__()


def test_another_lock_of_the_same_pid_is_another_run(tmp_path):
    """Containers have pids of their own."""
    with locked(tmp_path) as held:
        write_lock(tmp_path, pid=os.getpid(), host=socket.gethostname())
        with pytest.raises(UserError, match="was taken by process"):
            held.check(reread=True)


def test_a_run_that_was_taken_for_dead_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with locked(tmp_path) as held:
        write_lock(tmp_path)
        wait_until(lambda: not held._thread.is_alive())
        with pytest.raises(
            UserError, match=r"was taken by process 7 on elsewhere.*gave no sign of life for more than 3 minutes"
        ):
            held.check()
    assert json.loads((tmp_path / lock.FILE).read_text())["token"] == "other", "the other one's lock stays"


@pytest.mark.parametrize("left", ["nothing", "empty", "another's"])
def test_a_lock_that_is_gone_is_lost(tmp_path, left):
    """Another run took it while this one was suspended, and has ended since or begins at this moment."""
    with locked(tmp_path) as held:
        (tmp_path / lock.FILE).unlink()
        if left != "nothing":
            write_lock(tmp_path)
        if left == "empty":
            os.truncate(tmp_path / lock.FILE, 0)
        before = sorted(tmp_path.iterdir())
        held.check()  # has not looked
        held._last_seen -= 1000  # This process was suspended.
        for _ in range(2):
            with pytest.raises(UserError, match=r"was taken by"):
                held.check()
            write_lock(tmp_path) if left != "nothing" else None
    assert sorted(tmp_path.iterdir()) == before, "the other one's lock stays"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_server_that_is_away_for_a_while_loses_no_lock(tmp_path, monkeypatch, number):
    def away(path):
        raise UserError("cannot be read") from OSError(number, os.strerror(number))

    with locked(tmp_path) as held:
        with monkeypatch.context() as patch:
            patch.setattr(lock, "content", away)
            held.check(reread=True)
        held.check(reread=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["step", "evaluation", "save"])
def test_a_run_that_lost_its_lock_writes_nothing_more(blocks_dir, tmp_path, monkeypatch, moment):
    """It was suspended during a step, an evaluation or a save."""
    taken = []

    def take():
        if not taken:
            write_lock(tmp_path)
            held[0]._last_seen -= 1000
            taken.append({path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()})

    held = []
    acquired = mirrors.locked

    @contextlib.contextmanager
    def locked_here(*args, **options):
        with acquired(*args, **options) as found:
            held.append(found)
            yield found

    monkeypatch.setattr(mirrors, "locked", locked_here)
    target, name = {
        "step": (train_module, "log_step"),
        "evaluation": (train_module.Evaluation, "measure"),
        "save": (checkpoint, "write_checksums"),
    }[moment]
    done = getattr(target, name)

    def disturbed(*args, **options):
        if moment != "save":
            take()
        return done(*args, **options)

    if moment == "save":
        saved = checkpoint.Checkpoints._write_checksums

        def committed(self):
            take()
            saved(self)

        monkeypatch.setattr(checkpoint.Checkpoints, "_write_checksums", committed)
    else:
        monkeypatch.setattr(target, name, disturbed)
    config = support.run_config(blocks_dir, "transformer_pp", train__steps=4, checkpoint__every=2, eval__every=256 * 2)
    with pytest.raises(UserError, match="was taken by"):
        train_module.train(config, tmp_path)
    assert {path: path.read_bytes() for path in taken[0] if path.exists()} == taken[0]
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()]


def test_a_workdir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file; give a directory"):
        locked(tmp_path / "file").__enter__()
    with pytest.raises(UserError, match=r"Cannot write to .*; give another --workdir"):
        locked(tmp_path / "file" / "below").__enter__()


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    """The next run would wait until it is stale."""

    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = Path.open

    def full(path, mode="r", *options):
        if mode != "xb":
            return opened(path, mode, *options)
        opened(path, mode).close()
        return Full()

    monkeypatch.setattr(lock, "start_of", lambda pid: "running")  # which reads files as well
    with monkeypatch.context() as patch, pytest.raises(UserError, match="No space left on device"):
        patch.setattr(lock.Path, "open", full)
        patch.setattr(lock, "pid_space", str)
        with locked(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        pass


def test_a_workdir_that_is_moved_away_is_noticed(tmp_path):
    """What is written to the old place, where a save would make a new directory, would be lost."""
    workdir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with locked(workdir) as held:
        held.check(reread=True)
        workdir.rename(elsewhere)
        for again in (False, True):
            if again:
                workdir.mkdir()
            with pytest.raises(UserError, match=rf"{workdir} was moved or deleted while.*--workdir=DIR"):
                held.check(reread=True)
        held.check()
    assert list(workdir.iterdir()) == []
    assert list(elsewhere.iterdir()) == [], "the lock goes with the workdir"


# ------------------------------------------------------------------------------------------------------ in a store
def write_object(url, **changes):
    """A lock of a process on another host."""
    store.write(f"{url}/{lock.FILE}", json.dumps(ELSEWHERE | changes).encode())


def test_in_a_store_the_second_is_refused_and_the_next_is_not(memory):
    url = f"{memory}/run"
    with locked(url) as held:
        held.check(reread=True)
        with pytest.raises(UserError, match=rf"^{url} is in use by process {os.getpid()} on "):
            locked(url).__enter__()
        assert store.sizes(url).keys() == {lock.FILE}
    assert store.sizes(url) == {}
    with locked(url):
        pass


@pytest.mark.parametrize(("age", "refused"), [(0, True), (lock.STALE_SECONDS + 10, False)])
def test_in_a_store_the_age_decides(memory, monkeypatch, age, refused):
    url = f"{memory}/run"
    write_object(url)
    modified = store.modified
    older = datetime.timedelta(seconds=age)
    monkeypatch.setattr(store, "modified", lambda name: modified(name) - older * name.endswith(lock.FILE))
    if refused:
        with pytest.raises(UserError, match=r"in use by process 7 on elsewhere.*if it is dead, try again in 1[78]\d s"):
            locked(url).__enter__()
        assert store.sizes(url).keys() == {lock.FILE}, "no probe is left"
    else:
        with locked(url):
            assert json.loads(store.read(f"{url}/{lock.FILE}"))["pid"] == os.getpid()


def test_in_a_store_a_dead_process_of_this_machine_is_known_at_once(memory):
    url = f"{memory}/run"
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "space": lock.pid_space()}
    write_object(url, **mine, started="another process of this pid")
    with locked(url):
        pass


def test_in_a_store_who_lost_the_lock_ends(memory):
    url = f"{memory}/run"
    with locked(url) as held:
        held.check()
        write_object(url)
        held.check()  # has not looked
        with pytest.raises(UserError, match=r"was taken by process 7 on elsewhere"):
            held.check(reread=True)
        store.remove(f"{url}/{lock.FILE}")  # The other one ended: what it wrote is not this run's to go on with.
        with pytest.raises(UserError, match=r"was taken by process 7 on elsewhere"):
            held.check(reread=True)
        write_object(url)
    assert store.sizes(url).keys() == {lock.FILE}, "the other one's lock stays"


def test_in_a_store_a_living_run_writes_its_lock_anew_and_sees_another(memory, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    url = f"{memory}/run"
    with locked(url) as held:
        first = store.modified(f"{url}/{lock.FILE}")
        wait_until(lambda: store.modified(f"{url}/{lock.FILE}") > first)
        held.check()
        write_object(url)
        wait_until(lambda: not held._thread.is_alive())
        with pytest.raises(UserError, match="was taken by process 7"):
            held.check()
