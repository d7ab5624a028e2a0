"""Requeueing by the SLURM batch scripts, with real signals and stand-ins for srun and scontrol."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import support

LAUNCH = support.ROOT / "launch"


def program(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# A stand-in for srun. It saves checkpoint SAVES, if set, and checkpoint 10 at SIGTERM; a complete run has a report.
# SLURM signals only the tasks of a preempted job, so the stand-in signals itself.
SRUN = """
save() { mkdir -p "$WORKDIR/checkpoints/$1"; }
trap 'echo saved; save 10; exit ${STATUS-0}' TERM
[[ -z ${SAVES-} ]] || save "$SAVES"
touch started
case $ENDS in
  alone) exit "$STATUS" ;;
  complete) touch "$WORKDIR/report.md"; exit 0 ;;
  preempted) kill -TERM $$ ;;
esac
for i in {1..600}; do sleep 0.05; done
"""


def slurm_job(tmp_path, script, *args, send=(), **environment):
    """Run a batch script with stand-ins for srun and scontrol, send it signals, and return its status and output."""
    program(tmp_path, "srun", SRUN)
    program(tmp_path, "scontrol", 'echo "scontrol $*"')
    workdir = tmp_path / "run"
    workdir.mkdir(exist_ok=True)
    slurm = {"SLURM_JOB_ID": "42", "WORKDIR": str(workdir), "ENDS": "", **environment}
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | slurm
    command = ["bash", str(LAUNCH / script), *args]
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 30
            while not (tmp_path / "started").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            for number in send:
                process.send_signal(number)
            out, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    return process.returncode, out


REQUEUED = "launch: status {}, the run is not complete: queued again\nscontrol requeue 42\n"


@pytest.mark.parametrize(
    ("send", "environment", "status", "output"),
    [
        ([signal.SIGUSR1], {}, 0, "saved\n" + REQUEUED.format(0)),
        ([], {"ENDS": "preempted"}, 0, "saved\n" + REQUEUED.format(0)),
        ([signal.SIGTERM], {}, 0, "saved\n"),
        ([], {"ENDS": "complete"}, 0, ""),
        ([], {"ENDS": "alone", "STATUS": "75", "SAVES": "5"}, 75, REQUEUED.format(75)),
        ([], {"ENDS": "alone", "STATUS": "134", "SAVES": "10"}, 134, REQUEUED.format(134)),
        ([], {"ENDS": "alone", "STATUS": "137", "SAVES": "10"}, 137, REQUEUED.format(137)),
        ([], {"ENDS": "alone", "STATUS": "75"}, 75, ""),
        ([], {"ENDS": "alone", "STATUS": "2", "SAVES": "5"}, 2, ""),
        ([signal.SIGUSR1], {"STATUS": "2"}, 2, "saved\n"),
    ],
    ids=["limit", "preempted", "cancelled", "complete", "lost", "134", "137", "no progress", "error", "save failed"],
)
def test_slurm_job_is_requeued_if_it_can_resume(tmp_path, send, environment, status, output):
    (tmp_path / "run" / "checkpoints" / "7").mkdir(parents=True)
    args = ("--config=top1_chunk:110m", f"--workdir={tmp_path / 'run'}")
    assert slurm_job(tmp_path, "slurm.sbatch", *args, send=send, **environment) == (status, output)


@pytest.mark.parametrize(
    ("send", "status", "starts", "output"),
    [
        (signal.SIGUSR1, 130, 20, "saved\nscontrol requeue 40_7\n"),
        (signal.SIGTERM, 130, 1, "saved\n"),
        (signal.SIGTERM, 134, 1, "saved\n"),
        (None, 2, 1, ""),
        (None, 75, 1, "scontrol requeue 40_7\n"),
        (None, 134, 9, "scontrol requeue 40_7\n"),
        (None, 134, 10, ""),
    ],
    ids=["limit", "cancelled", "cancelled, lost", "error", "lost", "aborted", "lost again and again"],
)
def test_study_task_is_requeued(tmp_path, send, status, starts, output):
    array = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7", "STATUS": str(status)}
    array |= {"SLURM_RESTART_COUNT": str(starts - 1)} if starts > 1 else {}
    array |= {"ENDS": "" if send else "alone"}
    signals = [send] if send else []
    assert slurm_job(tmp_path, "slurm_study.sbatch", "--study=a.py", send=signals, **array) == (status, output)


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_study.sbatch"])
def test_early_signal_is_forwarded(tmp_path, name):
    """The signal arrives after the task started, before the script knows its process id."""
    text = (LAUNCH / name).read_text()
    assert text.count("job=$!\n") == 1
    late = tmp_path / "launch" / name
    late.parent.mkdir()
    late.write_text(text.replace("job=$!\n", "sleep 0.5; job=$!\n"))
    (tmp_path / "run").mkdir()
    array = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7", "STATUS": "130"}
    option = f"--workdir={tmp_path / 'run'}" if name == "slurm.sbatch" else "--study=a.py"
    status, output = slurm_job(tmp_path, late, "--config=a", option, send=[signal.SIGUSR1], **array)
    assert status == 130 and output.startswith("saved\n")


# Starts two processes of a run as SLURM would, and forwards SIGTERM.
SRUN_TWO_PROCESSES = """
import os, signal, subprocess, sys
address = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{os.environ['PORT']}", "JAX_NUM_PROCESSES": "2"}
environments = [os.environ | address | {"JAX_PROCESS_ID": str(index)} for index in (0, 1)]
command = [sys.executable, *sys.argv[3:]]  # after --kill-on-bad-exit and python
started = [subprocess.Popen(command, env=environment) for environment in environments]
signal.signal(signal.SIGTERM, lambda *_: [process.send_signal(signal.SIGTERM) for process in started])
sys.exit(max(process.wait() for process in started))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "status"), [("slurm.sbatch", 0), ("slurm_study.sbatch", 130)])
def test_two_process_job_resumes_after_its_time_limit(tmp_path, blocks_dir, script, status):
    """Near its time limit, a real run saves and is requeued; the next start completes it."""
    (tmp_path / "srun.py").write_text(SRUN_TWO_PROCESSES)
    program(tmp_path, "srun", f'exec "{sys.executable}" "{tmp_path / "srun.py"}" "$@"')
    program(tmp_path, "scontrol", 'echo "scontrol $*"')
    settings = support.run_settings(blocks_dir, train__steps=400, checkpoint__every=0, eval__every=0)
    argument = ",".join(f"{key}={value}" for key, value in settings.items())
    config = f"{support.ROOT}/configs/transformer_pp.py:debug,{argument}"
    workdir = tmp_path / "runs" / "slurm-42"
    run = {"workdir": str(workdir), "config": config}
    values = {"title": "t", "references": ("a",), "domains": ("arxiv",), "runs": {"a": run}}
    (tmp_path / "study.py").write_text(f"def get_study():\n    return {values!r}\n")
    option = f"--config={config}" if script == "slurm.sbatch" else f"--study={tmp_path / 'study.py'}"
    slurm = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "2", "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "0"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = support.environment() | slurm | {"PATH": path, "PYTHONPATH": str(support.ROOT)}

    def job(**environment):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        environment |= env | {"PORT": port}
        command = ["bash", str(LAUNCH / script), option]
        return subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    with job() as first:
        deadline = time.monotonic() + 150
        while support.n_rows(workdir) < 3 and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        first.send_signal(signal.SIGUSR1)
        out, _ = first.communicate(timeout=150)
    assert first.returncode == status
    assert out.endswith(REQUEUED.format(0) if script == "slurm.sbatch" else "scontrol requeue 42_0\n")
    (step,) = support.checkpoint_steps(workdir)
    assert 0 < step < 400
    with job(SLURM_RESTART_COUNT="1") as second:
        out, _ = second.communicate(timeout=150)
    assert second.returncode == 0
    assert "requeue" not in out
    assert (workdir / "report.md").exists()
    steps = [row["step"] for row in support.rows(workdir) if "train/lr" in row]
    assert steps == list(range(1, 401))
