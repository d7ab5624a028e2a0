"""Preparing blocks on a Dask cluster of real processes, which are interrupted and killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import seqjax
from tests import extras

from .conftest import command, contents, prepared, write_corpus

distributed = extras.package("distributed")

SECONDS = 60.0  # for anything to happen
LOOPBACK = ["--host=127.0.0.1", "--dashboard-address=127.0.0.1:0"]


class Cluster:
    """A scheduler and two workers of one thread, which have another current directory than the command."""

    def __init__(self, root: Path):
        self.root = root
        self.scheduler = self.started("dask_scheduler", "--port=0")
        self.address = self.said("dask_scheduler", r"Scheduler at: +(tcp://127\.0\.0\.1:\d+)")
        flags = [self.address, "--nthreads=1", "--no-nanny", f"--local-directory={root}"]
        self.workers = [self.started("dask_worker", *flags, log=f"worker_{index}") for index in range(2)]
        for index in range(2):
            self.said(f"worker_{index}", r"Registered to: +(tcp://)")

    def started(self, module: str, *flags: str, log: str = "") -> subprocess.Popen[bytes]:
        """A process of Dask, whose output is in a file."""
        with (self.root / (log or module)).open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{module}", *flags, *LOOPBACK],
                cwd=self.root,
                env=os.environ | {"PYTHONPATH": str(Path(seqjax.__file__).parents[1])},
                stdout=file,
                stderr=file,
            )

    def said(self, log: str, pattern: str) -> str:
        """What a process said, once it did."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, text := (self.root / log).read_text())):
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        return found[1]

    def stop(self) -> None:
        """End what still runs."""
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


@contextlib.contextmanager
def running(root: Path) -> Iterator[Cluster]:
    """A context with a cluster."""
    root.mkdir()
    cluster = Cluster(root)
    try:
        yield cluster
    finally:
        cluster.stop()


def stopped_midway(
    arguments: list[str], out: Path, *, parts: int, signalled: int | None, number: int
) -> tuple[int, str]:
    """Run a command, send a signal to it or to the process `signalled` after so many parts; its status and errors."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + SECONDS
    while len(list((out / ".parts").glob("0*.json"))) < parts:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(signalled or process.pid, number)
    _, errors = process.communicate(timeout=SECONDS)
    return process.returncode, errors


@pytest.mark.slow
@pytest.mark.usefixtures("heeded")
def test_interrupts_and_deaths_do_not_change_the_bytes(tmp_path: Path):
    """The user interrupts, the scheduler dies, a worker dies: the bytes are those of one process."""
    source = write_corpus(tmp_path / "source", documents=1200, shards=39)  # seconds, of which no signal may be late
    prepared(source, tmp_path / "here")
    out = tmp_path / "there"
    relative = Path(os.path.relpath(out))  # to this directory, which is not that of the workers
    with running(tmp_path / "first") as cluster:
        arguments = command(source, relative, f"--executor=dask:{cluster.address}")
        status, errors = stopped_midway(arguments, out, parts=4, signalled=None, number=signal.SIGINT)
        assert status == 130, errors
        assert "Finished shards are kept" in errors
        assert "Traceback" not in errors
        pid = cluster.scheduler.pid
        status, errors = stopped_midway(arguments, out, parts=12, signalled=pid, number=signal.SIGKILL)
        assert status == 2, errors
        assert "The connection to the scheduler was lost" in errors
        assert "Traceback" not in errors
    with running(tmp_path / "second") as cluster:
        arguments = command(source, relative, f"--executor=dask:{cluster.address}")
        pid = cluster.workers[0].pid
        status, errors = stopped_midway(arguments, out, parts=22, signalled=pid, number=signal.SIGKILL)
        assert status == 0, errors
        assert re.search(r"write (\d+)/\1 100%", errors), errors
        assert cluster.workers[0].wait() == -signal.SIGKILL
        assert cluster.workers[1].poll() is None
    assert contents(out) == contents(tmp_path / "here")


@pytest.mark.slow
def test_a_worker_with_another_seqjax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its versions are compared before anything is done; one that cannot import it at all is named as well."""
    source = write_corpus(tmp_path / "source", documents=1, shards=1)
    other = tmp_path / "other" / "seqjax"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('this machine has no seqjax')")
    monkeypatch.setattr(seqjax, "__file__", str(other / "__init__.py"))
    with running(tmp_path / "cluster") as cluster:
        arguments = command(source, tmp_path / "out", f"--executor=dask:{cluster.address}")
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "2 of 2 workers cannot do the work. The worker tcp://" in done.stderr
    assert "this machine has no seqjax" in done.stderr
    assert f"install seqjax {seqjax.__version__}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
