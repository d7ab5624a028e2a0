"""Runs in an object store, on a gs:// emulator: stopped, killed, and resumed on another machine.

Their results equal, bit by bit, an uninterrupted run in a local workdir.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import seqjax
from seqjax import store
from seqjax.errors import UserError
from seqjax.nn.params import fingerprint
from seqjax.study.runs.runner import Run
from seqjax.training import checkpoint, evaluate
from seqjax.training.loop import train
from tests import object_servers, support
from tests.chaos.kills import assert_equal_runs, finish

STEPS, PATIENCE = 40, 120.0
SETTINGS = {"train__steps": STEPS, "log__tensorboard": True, "eval__classes": True}
HANG = """
import sys, time
from pathlib import Path
mark = Path(sys.argv.pop(1))
def hang():
    time.sleep(1)  # for the other threads
    mark.touch()
    time.sleep(600)
from orbax.checkpoint._src.path import atomicity
finalize = atomicity.CommitFileTemporaryPath.finalize
async def hang_before_the_commit(self, *args, **options):
    if self.get_final().name == "10" and "gs:" in str(self.get_final()):
        hang()
    return await finalize(self, *args, **options)
atomicity.CommitFileTemporaryPath.finalize = hang_before_the_commit
from seqjax.command_line import run_command
from seqjax.commands.train import main
run_command(main)
"""


class Machine(NamedTuple):
    """The environment of processes that share a cache, and the cache's path."""

    environment: dict[str, str]
    cache: Path
    started: list["subprocess.Popen[str]"]

    def popen(self, command: list[str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command, env=self.environment, cwd=support.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.started.append(process)
        return process

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return support.run(command, env=self.environment)


@pytest.fixture
def machine(tmp_path) -> Iterator[Callable[..., Machine]]:
    """Return `machine("a", server)`; its processes end with the test."""
    started: list[subprocess.Popen[str]] = []

    def of(name: str, server: object_servers.Server) -> Machine:
        environment = support.environment() | server.environment | {"XDG_CACHE_HOME": str(tmp_path / name)}
        return Machine(environment, tmp_path / name, started)

    yield of
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def local_run(blocks_dir, tmp_path_factory) -> Path:
    """Return the run in a local workdir."""
    workdir = tmp_path_factory.mktemp("local_run") / "run"
    finish(support.command(blocks_dir, workdir, "transformer_pp", **SETTINGS))
    return workdir


def command(blocks_dir: Path, url: str) -> list[str]:
    return support.command(blocks_dir, url, "transformer_pp", **SETTINGS)


def wait_for(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps(url: str) -> list[int]:
    """Return the steps of the complete checkpoints."""
    parts = [name.split("/") for name in store.sizes(f"{url}/checkpoints")]
    return sorted(int(step) for step, *names in parts if names == [checkpoint.STORE_MARKER])


def run_files(url: str) -> set[str]:
    """Return the files that are not checkpoints."""
    return {name for name in store.sizes(url) if not name.startswith(("checkpoints/", "tensorboard/"))}


FILES = {
    "config.json", "run.json", "metrics.jsonl", "report.md", "report.png",
    "eval_losses/blocks.npz", "eval_losses/classes.npz",
    *(f"eval_losses/{step:08d}.npz" for step in (7, 14, 21, 28, 35, 40)),
}  # fmt: skip


@pytest.mark.slow
def test_init_from_reads_a_store(server, machine, blocks_dir, tmp_path):
    url, a, b = f"{server.url}/run", machine("a", server), machine("b", server)
    short = {"train__steps": 4, "optim__warmup_steps": 1}
    source = a.run(support.command(blocks_dir, url, "transformer_pp", **SETTINGS | short))
    assert source.returncode == 0, source.stderr
    still = support.command(blocks_dir, tmp_path / "run", "transformer_pp", **SETTINGS | short | {"optim__lr": 0.0})
    ended = b.run([*still, f"--init_from={url}"])
    assert ended.returncode == 0, ended.stderr
    origin = json.loads((tmp_path / "run" / "run.json").read_text())["init_from"]
    assert (origin["path"], origin["step"]) == (url, 4)
    assert origin["sha256"] == fingerprint(evaluate.restore(tmp_path / "run")[2])


@pytest.mark.slow
def test_a_stopped_run_finishes_on_another_machine(server, machine, blocks_dir, local_run):
    url, a, b = f"{server.url}/run", machine("a", server), machine("b", server)
    process = a.popen(command(blocks_dir, url))
    wait_for(lambda: steps(url), process)
    process.send_signal(signal.SIGSTOP)  # so it lives until the other one has started
    refused = b.run(command(blocks_dir, url))
    assert refused.returncode == 2
    assert re.search(f"{url} .*in use .* {process.pid} ", refused.stderr)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    assert f" --workdir={url}" in stderr
    stopped = max(steps(url))
    assert "run.lock" not in run_files(url)
    assert 0 < stopped < STEPS
    last = b.run(command(blocks_dir, url))
    assert last.returncode == 0, last.stderr
    assert f" {stopped} of {STEPS} in {url}" in last.stderr
    assert f"Report: {url}/report.md" in last.stderr
    assert run_files(url) == FILES
    assert any(name.startswith("tensorboard/") for name in store.sizes(url))
    assert steps(url) == [35, 40]
    assert_equal_runs(url, local_run)

    # Commands that read it, on a third machine.
    c = machine("c", server)
    evaluated = c.run([sys.executable, "-m", "seqjax.evaluate", f"--workdir={url}"])
    assert f"{url}, step {STEPS}, nats" in evaluated.stdout, evaluated.stderr
    assert "evaluation.json" in run_files(url)
    made = [c.run([sys.executable, "-m", "seqjax.generate", f"--workdir={d}", "--prompt=ab"]) for d in (url, local_run)]
    assert made[0].stdout == made[1].stdout != ""
    assert seqjax.load(url).loss("abc") == seqjax.load(local_run).loss("abc")
    run = Run(0, "run", url, support.run_config(blocks_dir, "transformer_pp", **SETTINGS), model="run")
    assert run.complete
    assert run.last_row()["step"] == STEPS
    dry = c.run([*command(blocks_dir, url), "--dry_run"])
    assert re.search(f"{url}, .*resumed", dry.stdout), dry.stderr


@pytest.mark.slow
def test_killed_in_the_middle_of_a_save(server, machine, blocks_dir, local_run, tmp_path):
    """The files of step 10 exist without its marker: step 5 is the newest checkpoint, here and elsewhere."""
    url, a, mark = f"{server.url}/run", machine("a", server), tmp_path / "mark"
    program = [sys.executable, "-c", HANG, str(mark)]
    process = a.popen([*program, *command(blocks_dir, url)[3:]])
    wait_for(mark.exists, process)
    process.kill()
    process.wait()
    assert steps(url) == [5]
    assert any(name.startswith("checkpoints/10/params/") for name in store.sizes(url))
    assert seqjax.load(url).step == 5
    # The same host knows that the lock's process has ended.
    last = machine("b", server).run(command(blocks_dir, url))
    assert last.returncode == 0, last.stderr
    assert re.search(f"Resuming .* 5 of {STEPS}", last.stderr)
    assert_equal_runs(url, local_run)
    assert steps(url) == [35, 40]


def test_a_short_run(server, blocks_dir, monkeypatch, tmp_path):
    """Its last files are not uploaded; the same command uploads them."""
    settings = {"train__steps": 2, "checkpoint__every": 0, "eval__every": 0, "log__every": 2, "model__n_layers": 1}
    settings |= {"data__eval_domains": ("c4",)}
    config = support.run_config(blocks_dir, "transformer_pp", **settings)
    url = f"{server.url}/run"
    write = store.write

    def dies(name, content):
        if name.endswith("report.md"):
            raise store.StoreError("E17.")
        write(name, content)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", dies)
        with pytest.raises(UserError, match=r"E17\. .*last checkpoint"):
            train(config, url)
    assert steps(url) == [2]
    assert "report.md" not in run_files(url)
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        with pytest.raises(UserError, match=f"{url} .*another config: train.steps: 2 -> 3"):
            train(support.run_config(blocks_dir, "transformer_pp", **settings | {"train__steps": 3}), url)
    assert train(config, url)
    assert [row["step"] for row in support.rows(url)] == [2, 2]
    assert "run.lock" not in run_files(url)
    report = store.read(f"{url}/report.md")
    assert report is not None
    assert f"--workdir={url}" in report.decode()


def distributed(blocks_dir: Path, url: str, machines: list[Machine]) -> list[tuple[int, str]]:
    """Run one process on each machine; return exit states and output."""
    args = [*command(blocks_dir, url), "--config.train.batch_size=12", "--distributed"]
    port = object_servers.free_port()
    there = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(len(machines))}
    processes = [
        machine._replace(environment=machine.environment | there | {"JAX_PROCESS_ID": str(i)}).popen(args)
        for i, machine in enumerate(machines)
    ]
    with ThreadPoolExecutor(len(processes)) as pool:
        said = [out[1] for out in pool.map(lambda process: process.communicate(timeout=2 * PATIENCE), processes)]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@pytest.mark.slow
def test_several_processes_without_a_shared_disk(server, machine, blocks_dir):
    """Orbax writes every process's part to gs://; only the first process writes the other files."""
    url, machines = f"{server.url}/run", [machine("a", server), machine("b", server)]
    ended = distributed(blocks_dir, url, machines)
    assert [status for status, _ in ended] == [0, 0], ended
    assert steps(url) == [STEPS - 5, STEPS]
    assert {name for name in FILES if "/" not in name} < run_files(url)  # its evaluations are at other steps
    names = {name for name in store.sizes(f"{url}/checkpoints/{STEPS}/data") if name.startswith("process_")}
    assert names == {"process_0-of-2.json", "process_1-of-2.json"}
    assert not list(machines[1].cache.rglob("metrics.jsonl"))
    again = machine("c", server).run([*command(blocks_dir, url), "--config.train.batch_size=12"])
    assert f" {STEPS} of {STEPS} in {url}" in again.stderr
    assert again.returncode == 0, again.stderr
