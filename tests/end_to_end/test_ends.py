"""Runs with several ends: each end equals a run planned for that length, whatever kills interrupt it."""

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.training import eval_losses
from seqjax.training.loop import train
from seqjax.training.schedule import end_steps, segments, shares_of_steps, steps_of_shares
from tests import support
from tests.chaos.kills import fingerprint

STEPS, WARMUP, LR = 24, 3, 0.01
# Cooldowns over half the steps share batches: 6 to 12, 9 to 18, 12 to 24.
ENDS = {
    "train__steps": STEPS, "train__ends": (0.5, 0.75, 1.0), "optim__cooldown": 0.5, "optim__lr": LR,
    "checkpoint__every": 4, "checkpoint__ends": "all", "eval__every": 0, "eval__tokens": 4 * support.SEQ_LEN,
    "model__n_layers": 1,
}  # fmt: skip
BRANCH = {12: 6, 18: 9, 24: 12}


def contents(workdir: Path):
    """Return everything independent of the clock: rows, block losses and parameters of the trunk and of every end."""
    found = {}
    for directory in (workdir, *(workdir / "ends" / str(end) for end in BRANCH)):
        losses = eval_losses.read(directory)[1]
        of_blocks = {(step, name): x.tolist() for step, d in losses.items() for name, x in d.items()}
        found[directory.relative_to(workdir).as_posix()] = (support.rows(directory), of_blocks)
    return found, [fingerprint(workdir / "ends" / str(end)) for end in BRANCH]


def command(blocks_dir: Path, workdir: Path) -> list[str]:
    return support.command(blocks_dir, workdir, "transformer_pp", **ENDS)


@pytest.fixture(scope="module")
def one_device(blocks_dir, tmp_path_factory) -> Path:
    """Run in a process with one device."""
    workdir = tmp_path_factory.mktemp("ends") / "one_device"
    ended = support.run(command(blocks_dir, workdir))
    assert ended.returncode == 0, ended.stderr
    return workdir


def test_each_step_has_the_rate_of_its_segment(one_device):
    rates = {row["step"]: row["train/lr"] for row in support.rows(one_device) if "train/lr" in row}
    assert list(rates) == list(range(1, 13)), "the trunk ends where the last cooldown begins"
    assert rates == pytest.approx({step: LR * min(step, WARMUP) / WARMUP for step in rates})
    for end, branch in BRANCH.items():
        rates = {
            row["step"]: row["train/lr"] for row in support.rows(one_device / "ends" / str(end)) if "train/lr" in row
        }
        want = {step: LR * (end + 1 - step) / (end + 1 - branch) for step in range(branch + 1, end + 1)}
        assert rates == pytest.approx(want)


SHORT = ENDS | {"train__steps": 12, "train__ends": (1.0,)}


@pytest.fixture(scope="module")
def short(blocks_dir, tmp_path_factory) -> Path:
    """Train a run with only the first end."""
    workdir = tmp_path_factory.mktemp("ends") / "short"
    ended = support.run(support.command(blocks_dir, workdir, "transformer_pp", **SHORT))
    assert ended.returncode == 0, ended.stderr
    return workdir


def test_an_end_equals_a_run_planned_for_its_length(one_device, short):
    """The run reads the same batches after the branch, although the trunk reads them again."""
    assert support.rows(short / "ends" / "12") == support.rows(one_device / "ends" / "12")
    assert support.rows(short) == support.rows(one_device)[:6]
    assert fingerprint(short) == fingerprint(one_device / "ends" / "12")
    (_, mine), (_, theirs) = eval_losses.read(short / "ends" / "12"), eval_losses.read(one_device / "ends" / "12")
    assert list(mine) == list(theirs) == [12]
    for name, losses in theirs[12].items():
        np.testing.assert_array_equal(mine[12][name], losses)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_an_extended_run_equals_a_run_with_all_ends_from_the_start(one_device, short, blocks_dir, tmp_path, kill):
    """Its settings are equal as well. run.json records the extension, also after a kill and in another process."""
    workdir = tmp_path / "extended"
    shutil.copytree(short, workdir)
    if kill:
        watched = workdir / "ends" / "18"
        status, stderr = support.interrupt(command(blocks_dir, workdir), watched, at_row=2, number=signal.SIGKILL)
        assert status == -signal.SIGKILL, f"the run was faster: {stderr}"
    ended = support.run(command(blocks_dir, workdir))
    assert ended.returncode == 0, ended.stderr
    said = r"extended .* 6 .* 12\b"
    assert re.search(said, ended.stderr)
    assert re.search(said, (workdir / "report.md").read_text())
    assert contents(workdir) == contents(one_device)
    for directory in (workdir, workdir / "ends" / "18", workdir / "ends" / "24"):
        assert json.loads((directory / "run.json").read_text())["extended"] == [{"step": 6, "steps": 12, "ends": [12]}]
        assert json.loads((directory / "config.json").read_text())["train"]["steps"] == STEPS
    assert "extended" not in json.loads((one_device / "run.json").read_text())


def test_refused_extensions_leave_the_run_unchanged(one_device, short, blocks_dir, tmp_path):
    """Cases: an end that branches off before the trunk's step, where the error names possible ends, and fewer steps."""
    workdir = tmp_path / "run"
    shutil.copytree(one_device, workdir)
    before = contents(workdir), (workdir / "config.json").read_bytes(), sorted(workdir.rglob("*"))

    def extended(**settings):
        return train(support.run_config(blocks_dir, "transformer_pp", **ENDS | settings), workdir)

    with pytest.raises(UserError, match=r"step 12, .* 15 .* 7\. .*--config\.train\.ends=") as caught:
        extended(train__steps=30)
    shares = tuple(map(float, re.findall(r"[\d.]+(?=[,)])", str(caught.value).partition("ends=")[2])))
    assert end_steps(
        support.run_config(blocks_dir, "transformer_pp", **ENDS | {"train__steps": 30, "train__ends": shares})
    ) == [12, 18, 24, 30]
    with pytest.raises(UserError, match=r"another config: train\.steps: 24 -> 20\. "):
        extended(train__steps=20)
    with pytest.raises(UserError, match=r"another config: train\.ends: \[0\.5, 0\.75, 1\.0\] -> \[\]\. "):
        extended(train__ends=())
    with pytest.raises(UserError, match=r"another config: optim\.lr: .*; train\.steps: 24 -> 30\. "):
        extended(train__steps=30, optim__lr=0.02)
    assert (contents(workdir), (workdir / "config.json").read_bytes(), sorted(workdir.rglob("*"))) == before


@pytest.mark.parametrize("steps", [1, 7, 24, 1580, 2**31 - 1])
def test_fractional_ends_equal_ends_in_steps(steps):
    ends = sorted({max(1, steps * i // 7) for i in range(1, 8)})
    assert steps_of_shares(shares_of_steps(ends, steps=steps), steps=steps) == ends
    assert shares_of_steps([12, 24], steps=24) == (0.5, 1.0)


def test_commands_on_a_run_read_its_last_end(one_device):
    assert fingerprint(one_device)[0] == STEPS
    assert fingerprint(one_device) == fingerprint(one_device / "ends" / str(STEPS))
    report = (one_device / "report.md").read_text(encoding="utf-8")
    last = support.rows(one_device / "ends" / str(STEPS))[-1]
    assert f"{last['eval/arxiv/loss']:.4f}" in report


@pytest.mark.parametrize(
    ("end", "row"),
    [
        pytest.param(None, 7, id="trunk"),
        pytest.param(12, 3, id="first end", marks=pytest.mark.slow),
        pytest.param(18, 2, id="second end", marks=pytest.mark.slow),
        pytest.param(24, 12, id="last end", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_equals_an_uninterrupted_run(one_device, blocks_dir, tmp_path, end, row):
    watched = tmp_path if end is None else tmp_path / "ends" / str(end)
    status, stderr = support.interrupt(command(blocks_dir, tmp_path), watched, at_row=row, number=signal.SIGKILL)
    assert status == -signal.SIGKILL, f"the run was faster: {stderr}"
    ended = support.run(command(blocks_dir, tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert contents(tmp_path) == contents(one_device)


@pytest.mark.slow  # three processes; test_resume.py kills a run without ends
def test_a_kill_and_a_stop(one_device, blocks_dir, tmp_path):
    """Kill the run in the trunk, stop it in a cooldown, where it saves, and resume it."""
    status, stderr = support.interrupt(command(blocks_dir, tmp_path), tmp_path, at_row=7, number=signal.SIGKILL)
    assert status == -signal.SIGKILL, f"the run was faster: {stderr}"
    status, stderr = support.interrupt(
        command(blocks_dir, tmp_path), tmp_path / "ends" / "18", at_row=2, number=signal.SIGTERM
    )
    assert status == 0, stderr
    assert "Stopped by SIGTERM after step" in stderr
    saved = support.checkpoint_steps(tmp_path / "ends" / "18")
    assert saved and saved[-1] < 18, "stopped before its end"
    ended = support.run(command(blocks_dir, tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert contents(tmp_path) == contents(one_device)


def test_a_finished_run_changes_nothing_and_reports_a_lost_end(one_device, blocks_dir, tmp_path):
    workdir = tmp_path / "again"
    shutil.copytree(one_device, workdir)
    before = contents(workdir)
    assert train(support.run_config(blocks_dir, "transformer_pp", **ENDS), workdir)
    assert contents(workdir) == before
    losses = eval_losses.path(workdir / "ends" / "12", 12)
    losses.write_bytes(b"PK but no zip")
    shutil.rmtree(workdir / "ends" / "12" / "checkpoints")
    with pytest.raises(UserError, match=r"ends/12 .*\(00000012\.npz .*damaged\)"):
        train(support.run_config(blocks_dir, "transformer_pp", **ENDS | {"checkpoint__ends": "last"}), workdir)
    shutil.rmtree(workdir / "ends" / "12")
    with pytest.raises(UserError, match=r"ends/12 .*missing\).* 6, .* 12\."):
        train(support.run_config(blocks_dir, "transformer_pp", **ENDS), workdir)


@pytest.mark.slow
def test_a_branch_compiles_nothing(blocks_dir, tmp_path, monkeypatch):
    traced, loss = [], Model.loss
    monkeypatch.setattr(Model, "loss", lambda self, *args: traced.append(True) or loss(self, *args))
    settings = ENDS | {"checkpoint__ends": "none", "train__steps": 8, "optim__warmup_steps": 1, "checkpoint__every": 0}
    assert train(support.run_config(blocks_dir, "transformer_pp", **settings), tmp_path)
    assert len(traced) == 1
    for end in (4, 6, 8):
        assert support.checkpoint_steps(tmp_path / "ends" / str(end)) == []
        assert [row["step"] for row in support.rows(tmp_path / "ends" / str(end)) if "eval/arxiv/loss" in row] == [end]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"train__ends": (0.75, 0.5, 1)}, r"config\.train\.ends=.*ascend to 1"),
        ({"train__ends": (0.5, 0.75)}, r"config\.train\.ends=.*ascend to 1"),
        ({"train__ends": (0.5, 0.51, 1)}, r"config\.train\.ends=.*distinct steps"),
        ({"optim__cooldown": 0.0}, r"config\.optim\.cooldown=0"),
        ({"optim__cooldown": 0.8}, r"config\.train\.ends=.* 2, .*config\.optim\.warmup_steps=3"),
    ],
)
def test_impossible_schedules_are_refused(blocks_dir, settings, named):
    with pytest.raises(UserError, match=named):
        support.run_config(blocks_dir, "transformer_pp", **ENDS | settings)


def test_a_store_is_refused(blocks_dir):
    with pytest.raises(UserError, match=r"--workdir=gs://bucket/run: .*config\.train\.ends .*this machine"):
        train(support.run_config(blocks_dir, "transformer_pp", **ENDS), "gs://bucket/run")


def test_segments_of_the_paper_and_the_study(blocks_dir):
    plain = support.run_config(blocks_dir, "transformer_pp", **ENDS | {"train__ends": ()})
    assert [(s.begin, s.end, s.is_end) for s in segments(plain)] == [(0, STEPS, True)]
    assert end_steps(plain) == []
    settings = {"train__steps": 1580, "train__ends": (0.5, 0.65, 0.8, 1), "optim__cooldown": 0.2}
    study = support.run_config(blocks_dir, "transformer_pp", **ENDS | settings)
    trunk = [(s.begin, s.end) for s in segments(study) if not s.is_end]
    cooldowns = [(s.begin, s.end) for s in segments(study) if s.is_end]
    assert trunk == [(0, 632), (632, 822), (822, 1011), (1011, 1264)]
    assert cooldowns == [(632, 790), (822, 1027), (1011, 1264), (1264, 1580)]
