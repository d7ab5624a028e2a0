"""Workers end with their parent process, even if it is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqjax.data import pipeline
from tests import support

PATIENCE = 120.0  # seconds; workers end much sooner

# A module, because a spawned process imports its function's module.
PARENT = """
import multiprocessing, time
from seqjax.terminal import end_with_parent

def work():
    end_with_parent()
    print("working", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    print(worker.pid, flush=True)
    worker.join()
"""
TRAINER = """
import sys, time
from pathlib import Path
from seqjax.config import DataConfig
from seqjax.data import open_corpus

if __name__ == "__main__":
    config = DataConfig(corpus="blocks", path=sys.argv[1], workers=1)
    iterator = open_corpus(config, seq_len=32, vocab_size=258).train_iterator(batch_size=2)
    next(iterator)
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    print(*children, "working", sep="\\n", flush=True)
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize("source", [PARENT, pytest.param(TRAINER, marks=pytest.mark.slow)], ids=["worker", "grain"])
def test_workers_of_a_killed_process_end(tmp_path: Path, blocks_dir: Path, source: str):
    (tmp_path / "parent.py").write_text(source, encoding="utf-8")
    environment = support.environment() | {"PYTHONPATH": str(support.ROOT)}
    args = [sys.executable, str(tmp_path / "parent.py"), str(blocks_dir)]
    process = subprocess.Popen(args, env=environment, stdout=subprocess.PIPE, text=True)
    workers: list[int] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "working\n":
                break
            workers.append(int(line))
        assert workers
        assert all(map(is_running, workers))
        process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while any(map(is_running, workers)):
            assert time.monotonic() < deadline, f"still running: {workers}"
            time.sleep(0.05)
    finally:
        process.kill()
        for pid in filter(is_running, workers):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_corpus_workers_end_with_their_parent(monkeypatch: pytest.MonkeyPatch):
    """Checks the function that Grain calls in each worker."""
    calls = []
    monkeypatch.setattr(pipeline, "end_with_parent", lambda: calls.append(True))

    class Dataset:
        def mp_prefetch(self, options, worker_init_fn):
            worker_init_fn(0, options.num_workers)
            return self

    pipeline.with_workers(Dataset(), 3)
    assert calls == [True]
