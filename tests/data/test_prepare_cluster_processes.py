"""Preparing blocks on Dask processes that are interrupted and killed."""

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

SECONDS = 60.0  # maximum wait
LOOPBACK = ["--host=127.0.0.1", "--dashboard-address=127.0.0.1:0"]


class Cluster:
    """A scheduler and two one-thread workers with their own current directory."""

    def __init__(self, root: Path):
        self.root = root
        self.scheduler = self.start("dask_scheduler", "--port=0")
        self.address = self.wait_for_log("dask_scheduler", r"Scheduler at: +(tcp://127\.0\.0\.1:\d+)")
        flags = [self.address, "--nthreads=1", "--no-nanny", f"--local-directory={root}"]
        self.workers = [self.start("dask_worker", *flags, log=f"worker_{index}") for index in range(2)]
        for index in range(2):
            self.wait_for_log(f"worker_{index}", r"Registered to: +(tcp://)")

    def start(self, module: str, *flags: str, log: str = "") -> subprocess.Popen[bytes]:
        """Start a Dask process with its output in a file."""
        with (self.root / (log or module)).open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{module}", *flags, *LOOPBACK],
                cwd=self.root,
                env=os.environ | {"PYTHONPATH": str(Path(seqjax.__file__).parents[1])},
                stdout=file,
                stderr=file,
            )

    def wait_for_log(self, log: str, pattern: str) -> str:
        """Wait until a log matches `pattern`, and return its first group."""
        deadline = time.monotonic() + SECONDS
        while not (match := re.search(pattern, text := (self.root / log).read_text())):
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        return match[1]

    def stop(self) -> None:
        """Kill all processes."""
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()


@contextlib.contextmanager
def running(root: Path) -> Iterator[Cluster]:
    """Return a context with a running cluster."""
    root.mkdir()
    cluster = Cluster(root)
    try:
        yield cluster
    finally:
        cluster.stop()


def stopped_midway(
    arguments: list[str], out: Path, *, parts: int, signalled: int | None, number: int
) -> tuple[int, str]:
    """Run a command, and send a signal after `parts` parts; return status and stderr.

    The signal goes to the process `signalled`, or to the command if it is None.
    """
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
def test_interrupts_and_kills_do_not_change_the_bytes(tmp_path: Path):
    """After an interrupt, a scheduler kill and a worker kill, the bytes are equal."""
    source = write_corpus(
        tmp_path / "source", documents=1200, shards=39
    )  # runs for seconds, so every signal arrives in time
    prepared(source, tmp_path / "local")
    out = tmp_path / "remote"
    relative = Path(os.path.relpath(out))  # the workers have another current directory
    with running(tmp_path / "first") as cluster:
        arguments = command(source, relative, f"--executor=dask:{cluster.address}")
        status, errors = stopped_midway(arguments, out, parts=4, signalled=None, number=signal.SIGINT)
        assert status == 130, errors
        assert "Finished shards are kept" in errors
        assert "Traceback" not in errors
        pid = cluster.scheduler.pid
        status, errors = stopped_midway(arguments, out, parts=12, signalled=pid, number=signal.SIGKILL)
        assert status == 2, errors
        assert "connection to the scheduler" in errors
        assert "Traceback" not in errors
    with running(tmp_path / "second") as cluster:
        arguments = command(source, relative, f"--executor=dask:{cluster.address}")
        pid = cluster.workers[0].pid
        status, errors = stopped_midway(arguments, out, parts=22, signalled=pid, number=signal.SIGKILL)
        assert status == 0, errors
        assert re.search(r"write (\d+)/\1 100%", errors), errors
        assert cluster.workers[0].wait() == -signal.SIGKILL
        assert cluster.workers[1].poll() is None
    assert contents(out) == contents(tmp_path / "local")


@pytest.mark.slow
def test_worker_without_seqjax_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker that cannot import seqjax is named before any job runs."""
    source = write_corpus(tmp_path / "source", documents=1, shards=1)
    broken = tmp_path / "other" / "seqjax"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('absent.so')")
    monkeypatch.setattr(seqjax, "__file__", str(broken / "__init__.py"))
    with running(tmp_path / "cluster") as cluster:
        arguments = command(source, tmp_path / "out", f"--executor=dask:{cluster.address}")
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "2 of 2 workers" in done.stderr and "The worker tcp://" in done.stderr
    assert "absent.so" in done.stderr
    assert f"install seqjax {seqjax.__version__}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
