"""The workdir lock: refusals, stale and dead locks, takeovers, heartbeats, local and in a store."""

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
OTHER_HOST = {"host": "elsewhere", "pid": 7, "space": "", "started": "1", "since": "yesterday", "token": "other"}


def write_lock(workdir, age=0.0, **changes):
    """Write a lock of a process on another host, last touched `age` seconds ago."""
    path = workdir / lock.FILE
    path.write_text(json.dumps(OTHER_HOST | changes))
    then = time.time() - age
    os.utime(path, (then, then))


@pytest.fixture
def other_process(tmp_path):
    """Start a process that holds the lock of `tmp_path / "run"`."""
    args = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, text=True, cwd=support.ROOT, env=support.environment())
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_lock_is_exclusive_and_released(tmp_path):
    with locked(str(tmp_path / "new" / "run")):
        with pytest.raises(UserError, match=f" {os.getpid()} on {socket.gethostname()}, since 2"):
            locked(tmp_path / "new" / "run").__enter__()
        assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == [lock.FILE]
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "new" / "run"):
        raise ZeroDivisionError
    with locked(tmp_path / "new" / "run"):
        pass
    assert not any((tmp_path / "new" / "run").iterdir())


def test_killed_process_loses_lock_immediately(tmp_path, other_process):
    with pytest.raises(UserError, match=f" {other_process.pid} on {socket.gethostname()}.* --workdir"):
        locked(tmp_path / "run").__enter__()
    other_process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while lock.start_time_of(other_process.pid) and time.monotonic() < deadline:  # it remains a zombie
        time.sleep(0.01)
    assert (tmp_path / "run" / lock.FILE).exists(), "SIGKILL prevents cleanup"
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / lock.FILE).read_text())["pid"] == os.getpid()


def test_reused_pid_is_another_process(tmp_path):
    """In a restarted container, the new run can have the killed run's pid."""
    this_process = {"host": socket.gethostname(), "pid": os.getpid(), "space": lock.pid_space()}
    write_lock(tmp_path, **this_process, started=lock.start_time_of(os.getpid()))
    with pytest.raises(UserError, match=f"in use .* {os.getpid()} "):
        locked(tmp_path).__enter__()
    write_lock(tmp_path, **this_process, started="12345")
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("changes", [{}, {"host": socket.gethostname(), "space": "another container"}])
def test_lock_from_another_host_expires_by_age(tmp_path, changes):
    write_lock(tmp_path, age=60, **changes)
    with pytest.raises(UserError, match=r" 7 on .* yesterday; .* 6\d s .* 1[12]\d s.*--workdir"):
        locked(tmp_path).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [lock.FILE], "the refused run leaves no file"
    write_lock(tmp_path, age=lock.STALE_SECONDS + 10, **changes)
    with locked(tmp_path):
        pass
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("ends", ["released", "dead", "alive"])
def test_restarted_job_waits_for_its_first_start(tmp_path, monkeypatch, capsys, ends):
    monkeypatch.setattr(lock, "LOOK_SECONDS", 0.02)
    write_lock(tmp_path, age=lock.STALE_SECONDS - (1 if ends == "dead" else 90))
    path = tmp_path / lock.FILE
    if ends != "dead":
        threading.Timer(0.2, path.unlink if ends == "released" else path.touch).start()
    if ends == "alive":
        with pytest.raises(UserError, match=r"in use .* 7 \w+ elsewhere"):
            locked(tmp_path, wait=True).__enter__()
    else:
        with locked(tmp_path, wait=True):
            assert json.loads(path.read_text())["pid"] == os.getpid()
    seconds = "1|0" if ends == "dead" else "90|89"
    assert re.search(rf" 7 on elsewhere; waiting .* ({seconds}) s", capsys.readouterr().err)


@pytest.mark.parametrize(("restarts", "processes"), [(None, 1), ("1", 1), (None, 2)])
def test_training_waits_after_a_scheduler_restart(blocks_dir, monkeypatch, restarts, processes):
    wait_flags = []

    def refuse(workdir, *, wait):
        wait_flags.append(wait)
        raise UserError("in use")

    monkeypatch.setattr(mirrors, "locked", refuse)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    with pytest.raises(UserError, match="in use"):
        train_module.train(support.run_config(blocks_dir), "anywhere")
    assert wait_flags == [restarts is not None or processes > 1]


def test_incomplete_lock_is_respected_until_stale(tmp_path):
    (tmp_path / lock.FILE).touch()
    with pytest.raises(UserError, match=" another process;"):
        locked(tmp_path).__enter__()
    write_lock(tmp_path, age=lock.STALE_SECONDS + 10)
    os.truncate(tmp_path / lock.FILE, 5)
    os.utime(tmp_path / lock.FILE, (1, 1))
    with locked(tmp_path):
        pass


def test_concurrent_runs_on_a_dead_lock_have_one_winner(tmp_path):
    write_lock(tmp_path, age=10_000)

    def take(_):
        try:
            return lock._acquire(str(tmp_path))
        except UserError:
            return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        holders = [holder for holder in pool.map(take, range(8)) if holder is not None]
    assert len(holders) == 1
    assert json.loads((tmp_path / lock.FILE).read_text()) == holders[0]._asdict()


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_heartbeat_touches_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with locked(tmp_path) as held:
        path = tmp_path / lock.FILE
        os.utime(path, (1, 1))
        wait_until(lambda: path.stat().st_mtime > 1)
        held.check()


def test_lock_is_stale_only_after_several_missed_beats():
    assert 0 < lock.LOOK_SECONDS <= lock.BEAT_SECONDS <= lock.STALE_SECONDS / 4


def test_heartbeat_survives_file_server_outage(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    utime, failures = os.utime, []

    def fail_three_times(*args, **options):
        if len(failures) < 3:
            failures.append(args)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        utime(*args, **options)

    with locked(tmp_path) as held:
        path = tmp_path / lock.FILE
        os.utime(path, (1, 1))
        monkeypatch.setattr(lock.os, "utime", fail_three_times)
        wait_until(lambda: path.stat().st_mtime > 1)
        assert len(failures) == 3
        held.check(reread=True)


def test_heartbeat_alone_protects_a_run_on_another_host(tmp_path, monkeypatch):
    """The process is invisible, as on another host: a live run keeps its lock, a silent run loses it."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lock, "STALE_SECONDS", 1.0)
    spaces = iter(map(str, range(1000)))
    monkeypatch.setattr(lock, "pid_space", lambda: next(spaces))
    with locked(tmp_path):
        time.sleep(1.2)
        with pytest.raises(UserError, match=f"in use .* {os.getpid()} "):
            locked(tmp_path).__enter__()
    write_lock(tmp_path, age=1.2)
    with locked(tmp_path):
        assert json.loads((tmp_path / lock.FILE).read_text())["pid"] == os.getpid()


def test_running_local_process_keeps_a_stale_lock(tmp_path, other_process):
    """The process may have been suspended."""
    path = tmp_path / "run" / lock.FILE
    then = time.time() - 10 * lock.STALE_SECONDS
    os.utime(path, (then, then))
    with pytest.raises(UserError, match=f"in use .* {other_process.pid} "):
        locked(tmp_path / "run").__enter__()


def test_same_pid_with_another_token_is_another_run(tmp_path):
    """Two containers can have the same pid."""
    with locked(tmp_path) as held:
        write_lock(tmp_path, pid=os.getpid(), host=socket.gethostname())
        with pytest.raises(UserError, match=f"was taken .* {os.getpid()} "):
            held.check(reread=True)


def test_run_stops_after_another_run_took_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    with locked(tmp_path) as held:
        write_lock(tmp_path)
        wait_until(lambda: not held._thread.is_alive())
        with pytest.raises(UserError, match=r"taken .* 7 \w+ elsewhere.* 3 minutes"):
            held.check()
    assert json.loads((tmp_path / lock.FILE).read_text())["token"] == "other", "the other run's lock stays"


@pytest.mark.parametrize("left", ["nothing", "empty", "another's"])
def test_missing_or_replaced_lock_counts_as_taken(tmp_path, left):
    """While this run was suspended, another run took the lock; it has ended since, or is just starting."""
    with locked(tmp_path) as held:
        (tmp_path / lock.FILE).unlink()
        if left != "nothing":
            write_lock(tmp_path)
        if left == "empty":
            os.truncate(tmp_path / lock.FILE, 0)
        files_before = sorted(tmp_path.iterdir())
        held.check()  # does not reread the lock
        held._last_seen -= 1000  # as if this process had been suspended
        for _ in range(2):
            with pytest.raises(UserError, match="was taken"):
                held.check()
            write_lock(tmp_path) if left != "nothing" else None
    assert sorted(tmp_path.iterdir()) == files_before, "the other run's lock stays"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_unreadable_lock_is_not_lost(tmp_path, monkeypatch, number):
    def fail(path):
        raise UserError("cannot be read") from OSError(number, os.strerror(number))

    with locked(tmp_path) as held:
        with monkeypatch.context() as patch:
            patch.setattr(lock, "content", fail)
            held.check(reread=True)
        held.check(reread=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["step", "evaluation", "save"])
def test_run_without_its_lock_writes_nothing(blocks_dir, tmp_path, monkeypatch, moment):
    """The run was suspended during a step, an evaluation or a save."""
    snapshots = []

    def take_lock():
        if not snapshots:
            write_lock(tmp_path)
            locks[0]._last_seen -= 1000
            snapshots.append({path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()})

    locks = []
    original_locked = mirrors.locked

    @contextlib.contextmanager
    def recording_locked(*args, **options):
        with original_locked(*args, **options) as held_lock:
            locks.append(held_lock)
            yield held_lock

    monkeypatch.setattr(mirrors, "locked", recording_locked)
    target, name = {
        "step": (train_module, "log_step"),
        "evaluation": (train_module.Evaluation, "measure"),
        "save": (checkpoint.Checkpoints, "_write_checksums"),
    }[moment]
    original = getattr(target, name)

    def take_lock_first(*args, **options):
        take_lock()
        return original(*args, **options)

    monkeypatch.setattr(target, name, take_lock_first)
    config = support.run_config(blocks_dir, "transformer_pp", train__steps=4, checkpoint__every=2, eval__every=256 * 2)
    with pytest.raises(UserError, match="was taken"):
        train_module.train(config, tmp_path)
    assert {path: path.read_bytes() for path in snapshots[0] if path.exists()} == snapshots[0]
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()]


def test_unwritable_workdir_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"--workdir={tmp_path}/file .*a directory"):
        locked(tmp_path / "file").__enter__()
    with pytest.raises(UserError, match=rf"{tmp_path}/file/below \({os.strerror(errno.ENOTDIR)}\).*--workdir"):
        locked(tmp_path / "file" / "below").__enter__()


def test_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    """An incomplete lock would block the next run until it is stale."""

    class Full(io.BytesIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original_open = Path.open

    def open_on_full_disk(path, mode="r", *options):
        if mode != "xb":
            return original_open(path, mode, *options)
        original_open(path, mode).close()
        return Full()

    monkeypatch.setattr(lock, "start_time_of", lambda pid: "running")  # the real function opens files too
    with monkeypatch.context() as patch, pytest.raises(UserError, match=os.strerror(errno.ENOSPC)):
        patch.setattr(lock.Path, "open", open_on_full_disk)
        patch.setattr(lock, "pid_space", str)
        with locked(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        pass


def test_moved_workdir_is_detected(tmp_path):
    """A save would recreate the old path, and its content would be lost."""
    workdir, moved = tmp_path / "run", tmp_path / "elsewhere"
    with locked(workdir) as held:
        held.check(reread=True)
        workdir.rename(moved)
        for recreated in (False, True):
            if recreated:
                workdir.mkdir()
            with pytest.raises(UserError, match=rf"{workdir} was moved .*--workdir=DIR"):
                held.check(reread=True)
        held.check()
    assert list(workdir.iterdir()) == []
    assert list(moved.iterdir()) == [], "the lock moves with the workdir and is removed"


# ------------------------------------------------------------------------------------------------------ in a store
def write_object(url, **changes):
    """Write a lock of a process on another host."""
    store.write(f"{url}/{lock.FILE}", json.dumps(OTHER_HOST | changes).encode())


def test_store_lock_is_exclusive_and_released(memory):
    url = f"{memory}/run"
    with locked(url) as held:
        held.check(reread=True)
        with pytest.raises(UserError, match=rf"^{url} .*in use .* {os.getpid()} "):
            locked(url).__enter__()
        assert store.sizes(url).keys() == {lock.FILE}
    assert store.sizes(url) == {}
    with locked(url):
        pass


@pytest.mark.parametrize(("age", "refused"), [(0, True), (lock.STALE_SECONDS + 10, False)])
def test_store_lock_expires_by_age(memory, monkeypatch, age, refused):
    url = f"{memory}/run"
    write_object(url)
    modified = store.modified
    older = datetime.timedelta(seconds=age)
    monkeypatch.setattr(store, "modified", lambda name: modified(name) - older * name.endswith(lock.FILE))
    if refused:
        with pytest.raises(UserError, match=r"in use .* 7 \w+ elsewhere.* 1[78]\d s"):
            locked(url).__enter__()
        assert store.sizes(url).keys() == {lock.FILE}, "the probe object is removed"
    else:
        with locked(url):
            assert json.loads(store.read(f"{url}/{lock.FILE}"))["pid"] == os.getpid()


def test_store_lock_of_dead_local_process_is_taken_immediately(memory):
    url = f"{memory}/run"
    this_process = {"host": socket.gethostname(), "pid": os.getpid(), "space": lock.pid_space()}
    write_object(url, **this_process, started="another process of this pid")
    with locked(url):
        pass


def test_store_run_stops_after_losing_its_lock(memory):
    url = f"{memory}/run"
    with locked(url) as held:
        held.check()
        write_object(url)
        held.check()  # does not reread the lock
        with pytest.raises(UserError, match=r"was taken .* 7 \w+ elsewhere"):
            held.check(reread=True)
        store.remove(f"{url}/{lock.FILE}")  # The other run has ended; this run must not resume its files.
        with pytest.raises(UserError, match=r"was taken .* 7 \w+ elsewhere"):
            held.check(reread=True)
        write_object(url)
    assert store.sizes(url).keys() == {lock.FILE}, "the other run's lock stays"


def test_store_heartbeat_rewrites_the_lock_and_detects_a_takeover(memory, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    url = f"{memory}/run"
    with locked(url) as held:
        first = store.modified(f"{url}/{lock.FILE}")
        wait_until(lambda: store.modified(f"{url}/{lock.FILE}") > first)
        held.check()
        write_object(url)
        wait_until(lambda: not held._thread.is_alive())
        with pytest.raises(UserError, match=r"was taken .* 7 "):
            held.check()
