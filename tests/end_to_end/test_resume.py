"""Real processes are stopped or killed and restarted: their results equal an uninterrupted run's.

Bit-equal on one CPU device: every row of `metrics.jsonl` except clock values, and every parameter.
"""

import random
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from seqjax.commands import train
from tests import support
from tests.chaos.kills import assert_equal_runs, fingerprint

pytestmark = pytest.mark.slow  # a run of a minute, killed and stopped; test_ends.py has a quick kill
STEPS = 40


class Stop(NamedTuple):
    """One interruption: the signal, its time and the result."""

    number: int
    at_row: int
    status: int
    stderr: str
    steps: list[int]  # complete checkpoints afterwards


def history(blocks_dir: Path, workdir: Path, stops: list[tuple[int, int, float]]):
    """Start the run, interrupt it at each (signal, row, delay), resume it every time, and let it end."""
    args = support.command(blocks_dir, workdir, train__steps=STEPS)
    met = []
    for number, at_row, delay in stops:
        status, stderr = support.interrupt(args, workdir, at_row=at_row, number=number, delay=delay)
        met.append(Stop(number, at_row, status, stderr, support.checkpoint_steps(workdir)))
    last = support.run(args)
    assert last.returncode == 0, last.stderr
    return met, last.stderr


@pytest.fixture(scope="module")
def histories(blocks_dir, tmp_path_factory):
    """Two runs of one config: uninterrupted and killed. Stops are slow; test_processes.py has one of them."""
    root = tmp_path_factory.mktemp("histories")
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed of the kill point: {seed}\n")
    draw = random.Random(seed)
    stops = [(signal.SIGKILL, draw.randrange(1, STEPS), draw.uniform(0, 0.2))]
    met = {
        "uninterrupted": history(blocks_dir, root / "uninterrupted", []),
        "killed": history(blocks_dir, root / "killed", stops),
    }
    return {name: (root / name, *of_run) for name, of_run in met.items()}


def test_rows_are_complete_and_unique(histories):
    """One row per step and one per evaluation, every 7 steps and at the end."""
    workdir = histories["uninterrupted"][0]
    rows = support.rows(workdir)
    assert [r["step"] for r in rows if "train/lr" in r] == list(range(1, STEPS + 1))
    evaluations = [r for r in rows if any(k.startswith("eval/") for k in r)]
    assert [r["step"] for r in evaluations] == [*range(7, STEPS, 7), STEPS]
    losses = [r["train/loss"] for r in rows if "train/lr" in r]
    assert losses[-1] < losses[0] - 1, "a run that learns nothing compares equal too easily"
    # the training loss in an evaluation row is the mean since the previous evaluation
    assert evaluations[1]["train/loss"] == pytest.approx(sum(losses[7:14]) / 7, rel=1e-6)
    assert evaluations[-1]["train/loss"] == pytest.approx(sum(losses[35:40]) / 5, rel=1e-6)


def assert_polite(workdir: Path, stop: Stop) -> None:
    assert stop.status == 0, stop.stderr
    assert "Traceback" not in stop.stderr
    step = stop.steps[-1]
    assert f" {signal.Signals(stop.number).name} after step {step};" in stop.stderr
    assert f"--workdir={workdir}" in stop.stderr
    assert step < STEPS


def test_a_killed_run_equals_an_uninterrupted_run(histories):
    workdir, stops, _ = histories["killed"]
    assert [stop.status for stop in stops] == [-signal.SIGKILL], "the kill did not hit: the run was faster"
    assert_equal_runs(workdir, histories["uninterrupted"][0])


def test_two_stops(histories, blocks_dir, tmp_path):
    """Each saves and prints how to resume."""
    workdir = tmp_path / "run"
    stops, _ = history(blocks_dir, workdir, [(signal.SIGTERM, 12, 0.0), (signal.SIGINT, 27, 0.0)])
    for stop in stops:
        assert_polite(workdir, stop)
    assert re.search(f"Resuming .* {stops[0].steps[-1]} of {STEPS}", stops[1].stderr)
    assert_equal_runs(workdir, histories["uninterrupted"][0])


def test_many_kills(histories, blocks_dir, tmp_path):
    """Six kills at random points, also during the writing of a checkpoint."""
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed: {seed}\n")
    draw = random.Random(seed)
    stops = [(signal.SIGKILL, row, draw.uniform(0, 0.3)) for row in sorted(draw.sample(range(1, STEPS + 4), 6))]
    met, _ = history(blocks_dir, tmp_path / "run", stops)
    assert sum(stop.status == -signal.SIGKILL for stop in met) >= 3
    assert_equal_runs(tmp_path / "run", histories["uninterrupted"][0])


def test_restarting_a_finished_run_changes_nothing(histories, blocks_dir, tmp_path, capsys):
    """It prints the report again. It runs in this process on eight devices, because nothing is computed."""
    workdir = tmp_path / "again"
    shutil.copytree(histories["uninterrupted"][0], workdir)
    before = support.rows(workdir), fingerprint(workdir), support.checkpoint_steps(workdir)
    (workdir / "report.md").unlink()
    train.main(support.command(blocks_dir, workdir, train__steps=STEPS)[3:])
    assert re.search(f"Resuming .* {STEPS} of {STEPS}", capsys.readouterr().err)
    assert (support.rows(workdir), fingerprint(workdir), support.checkpoint_steps(workdir)) == before
    assert (workdir / "report.md").exists()


def test_resume_with_another_number_of_devices(histories, blocks_dir, tmp_path):
    """Stopped on one device and finished on eight: nearly equal, because sums have another order."""
    workdir = tmp_path / "eight"
    stop = support.interrupt(
        support.command(blocks_dir, workdir, train__steps=STEPS), workdir, at_row=12, number=signal.SIGTERM
    )
    assert stop[0] == 0, stop[1]
    eight = support.environment("--xla_force_host_platform_device_count=8")
    args = support.command(blocks_dir, workdir, train__steps=STEPS, mesh__fsdp=2, mesh__tensor=2)
    result = support.run(args, env=eight)
    assert result.returncode == 0, result.stderr
    assert "on 8 x cpu" in result.stderr
    for a, b in zip(support.rows(workdir), support.rows(histories["uninterrupted"][0]), strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=2e-3)
