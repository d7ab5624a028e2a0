"""Two real processes share a run over the loopback interface: which data they read, what they write, how they stop."""

import re
import shutil
import signal
import socket
import subprocess
import time

import numpy as np
import pytest

from seqjax.command_line import LOST
from seqjax.data import open_corpus
from seqjax.reading import read_json
from seqjax.training import workdir as workdirs
from seqjax.training.workdir import load_config
from tests import support
from tests.end_to_end.reference import Reference

pytestmark = pytest.mark.slow  # two processes for a minute
SETTINGS = {"train__steps": 100_000, "optim__warmup_steps": 0, "eval__every": 0, "checkpoint__every": 0}
SETTINGS |= {"train__seed": 2, "log__every": 3, "eval__tokens": support.SEQ_LEN}
SETTINGS |= {"train__batch_size": 12}  # for two processes and for three
# The exit of a process that lost another one: by seqjax's check, or aborted by JAX.
LOST_STATUSES = (LOST, -signal.SIGABRT)
LOST_WORDS = "Another process of the run was probably lost|another task died"
PATIENCE = 150.0  # seconds; a run needs far less


def environment(*, index: int, count: int, port: int) -> dict[str, str]:
    there = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    return {**support.environment(), **there, "JAX_PROCESS_ID": str(index)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Processes:
    """A context of the processes of a run; it ends them."""

    def __init__(self, blocks_dir, workdir, count):
        args = [
            *support.command(blocks_dir, workdir, "transformer_pp", **SETTINGS),
            "--distributed",
            "--start_timeout=60",
        ]
        port = free_port()
        self.workdir = workdir
        self.logs = {index: workdir.parent / f"{workdir.name}-{count}-{index}.log" for index in range(count)}
        self.started = {}
        for index, log in self.logs.items():
            with log.open("w") as file:
                env = environment(index=index, count=count, port=port)
                self.started[index] = subprocess.Popen(args, cwd=support.ROOT, env=env, stdout=file, stderr=file)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self.started.values():
            process.kill()
            process.wait()

    def wait_for_rows(self, rows):
        deadline = time.monotonic() + PATIENCE
        while support.n_rows(self.workdir) < rows and all(p.poll() is None for p in self.started.values()):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def ends(self):
        """Return the exit status of each process."""
        return [process.wait(timeout=PATIENCE) for process in self.started.values()]

    def said(self):
        return [log.read_text() for log in self.logs.values()]


def run_until(blocks_dir, workdir, *, processes: int, rows: int) -> list[str]:
    """Start or resume a run of several processes; stop only the last one at `rows`. Return each process's output."""
    with Processes(blocks_dir, workdir, processes) as run:
        run.wait_for_rows(rows)
        run.started[processes - 1].send_signal(signal.SIGTERM)
        assert run.ends() == [0] * processes, run.said()
    return run.said()


@pytest.fixture(scope="module")
def stopped(blocks_dir, tmp_path_factory):
    """Return the workdir of a two-process run in which only the second was stopped, with each process's output."""
    workdir = tmp_path_factory.mktemp("processes") / "run"
    return workdir, run_until(blocks_dir, workdir, processes=2, rows=2)


@pytest.fixture(scope="module")
def one_process(blocks_dir, stopped):
    """Return the rows of the same run in one process, without a stop."""
    workdir = stopped[0].parent / "one_process"
    run_until(blocks_dir, workdir, processes=1, rows=len(support.rows(stopped[0])) + 3)
    return support.rows(workdir)


@pytest.mark.parametrize(("killed", "processes"), [(0, 1), (1, 3)], ids=["the coordinator", "another"])
def test_resume_with_another_number_of_processes(blocks_dir, stopped, one_process, killed, processes):
    """After one of two was killed and the other ended, the resumed run reads the same data as an uninterrupted run: its
    metrics are equal.
    """
    workdir = shutil.copytree(stopped[0], stopped[0].parent / f"on-{processes}")
    before = len(support.rows(workdir))
    with Processes(blocks_dir, workdir, 2) as run:
        run.wait_for_rows(before + 1)
        begin = time.monotonic()
        run.started[killed].kill()
        statuses = run.ends()
        seconds = time.monotonic() - begin
    other = run.said()[1 - killed]
    assert statuses[killed] == -signal.SIGKILL
    assert statuses[1 - killed] in LOST_STATUSES, other
    assert re.search(LOST_WORDS, other), other
    assert seconds < 60
    run_until(blocks_dir, workdir, processes=processes, rows=before + 2)
    rows = support.rows(workdir)
    assert len(rows) >= before + 2
    common = min(len(rows), len(one_process))
    assert common >= before + 2
    for got, want in zip(rows[:common], one_process[:common], strict=True):
        assert got == pytest.approx(want, rel=1e-5)


def test_an_error_in_one_process_ends_the_others(blocks_dir, tmp_path):
    """Only the first process detects that the workdir belongs to another run; the second would wait for it."""
    workdirs.save_config(tmp_path / "run", support.run_config(blocks_dir, "transformer_pp"))
    with Processes(blocks_dir, tmp_path / "run", 2) as run:
        own, other = run.ends()
    first, second = run.said()
    assert own == 2, first
    assert other in LOST_STATUSES, second
    assert re.search("^error: .*holds a run with another config", first, re.MULTILINE), first
    assert re.search(LOST_WORDS, second), second


def test_each_process_reads_its_own_part_of_the_data(stopped):
    """The first logged losses come from batches whose halves are the data of process 0 and process 1."""
    workdir, _ = stopped
    config = load_config(workdir)
    corpus = open_corpus(config.data, seq_len=support.SEQ_LEN, vocab_size=config.model.vocab_size)
    halves = [corpus.train_iterator(batch_size=6, process_index=i, process_count=2) for i in (0, 1)]
    batches = [[next(half)["tokens"] for half in halves] for _ in range(6)]
    for half in halves:
        half.close()
    reference = Reference(config)
    want = reference.follow(config, [np.concatenate(parts) for parts in batches])
    first_alone = reference.follow(config, [np.concatenate([first, first]) for first, _ in batches])
    logged = [row for row in support.rows(workdir) if "train/lr" in row][:2]
    assert [row["step"] for row in logged] == [3, 6]
    for row in logged:
        expected = want[row["step"] - 1]
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert first_alone[row["step"] - 1]["train/grad_norm"] != pytest.approx(expected["train/grad_norm"], rel=1e-3)


def test_only_the_first_process_writes_and_prints(stopped):
    workdir, (first, second) = stopped
    assert "Training transformer_pp" in first
    assert "step 3/100000" in first
    assert "Training" not in second
    assert "step" not in second
    (line,) = re.findall("^2 processes on 1 host, 1 device in each: 2 x cpu .*", first, re.MULTILINE)
    assert line.endswith("mesh data=2 x fsdp=1 x seq=1 x tensor=1"), line
    host = re.escape(socket.gethostname())
    assert re.search(rf"^  {host}: process 0-1, device .*; process 0 coordinates and writes$", first, re.MULTILINE)
    assert "coordinates" not in second
    assert read_json(workdir / "run.json")["processes"] == 2
    steps = [row["step"] for row in support.rows(workdir)]
    assert steps == sorted(set(steps)), "rows written by two"


def test_a_signal_to_one_stops_both_at_one_step(stopped):
    """The state is saved once, with one data position per process."""
    workdir, (first, _) = stopped
    (step,) = support.checkpoint_steps(workdir)
    assert f"Stopped by a signal to one of the processes after step {step};" in first
    assert support.rows(workdir)[-1]["step"] in (step - 2, step - 1, step)
    saved = [p.name for p in (workdir / "checkpoints" / str(step)).rglob("*") if "process" in p.name]
    assert any("process_0-of-2" in name for name in saved)
    assert any("process_1-of-2" in name for name in saved)
