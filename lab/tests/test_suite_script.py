"""Test lab/suite/suite.sh: its commands, jobs, failures and refusals."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import support
from tests.launch.test_launch import launch

SCRIPT = str(support.ROOT / "lab" / "suite" / "suite.sh")


def test_dry_run_prints_all_commands():
    lines = launch(SCRIPT, "--dry_run", "--out=a b", "--configs=mamba2,rwkv7", "--config.train.steps=3").stdout
    first, needle, tasks, second, *_, recall, page = [shlex.split(line)[4:] for line in lines.splitlines()]
    assert first == ["--config=mamba2:demo", "--workdir=a b/mamba2", "--config.train.steps=3"]
    assert needle == ["--workdir=a b/mamba2", "--lengths=1024", "--samples=100", "--batch_size=32"]
    assert tasks == ["--workdir=a b/mamba2", "--tasks=local"]
    assert second[:2] == ["--config=rwkv7:demo", "--workdir=a b/rwkv7"]
    recalled = ["--size=demo", "--models=Transformer++;Top-1 Chunk, exact;Mamba-2", "--jobs=1", "--out=a b/recall"]
    assert recall == recalled and page == ["--out=a b"]


@pytest.fixture
def fake_python(tmp_path) -> dict[str, str]:
    """Environment with a `python` that logs its arguments and GPU to calls.log, and fails for the config `bad`."""
    log = tmp_path / "calls.log"
    script = f"""#!/bin/sh
echo "$2 ${{3#--}} gpu $CUDA_VISIBLE_DEVICES $XLA_PYTHON_CLIENT_MEM_FRACTION" >> '{log}'
case "$*" in *config=bad*) echo it is bad; exit 3 ;; *config=long*) sleep 60; echo late >> '{log}' ;; esac
"""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(script)
    python.chmod(0o755)
    return {"PATH": f"{python.parent}:{os.environ['PATH']}"}


def test_parallel_jobs_get_a_gpu_or_a_share(tmp_path, fake_python):
    result = launch(
        SCRIPT, f"--out={tmp_path}/o", "--configs=a,b,c", "--jobs=3", CUDA_VISIBLE_DEVICES="4,7", **fake_python
    )
    assert result.returncode == 0, result.stderr
    calls = (tmp_path / "calls.log").read_text().splitlines()
    assert sorted(line for line in calls if line.startswith("seqjax.main")) == [
        "seqjax.main config=a:demo gpu 4 .45",
        "seqjax.main config=b:demo gpu 7 .45",
        "seqjax.main config=c:demo gpu 4 .45",
    ]
    assert sum("evals.niah" in line for line in calls) == 3 and len(calls) == 11
    assert calls[-2].startswith("seqjax.evals.recall size=demo gpu 4,7")
    assert "+ python -m seqjax.main --config=b:demo" in (tmp_path / "o" / "b.log").read_text()


def test_failed_config_is_reported_after_the_others_end(tmp_path, fake_python):
    result = launch(SCRIPT, f"--out={tmp_path}/o", "--configs=a,bad", "--jobs=2", **fake_python)
    assert result.returncode == 1
    assert "it is bad" in result.stderr and "failed: bad;" in result.stderr
    calls = (tmp_path / "calls.log").read_text()
    assert calls.count("niah") == 1 and "recall" not in calls


@pytest.mark.usefixtures("heeded")
def test_stopped_suite_stops_its_processes(tmp_path, fake_python):
    command = ["bash", SCRIPT, f"--out={tmp_path}/o", "--configs=long,long2", "--jobs=2"]
    log = tmp_path / "calls.log"
    with subprocess.Popen(command, env=os.environ | fake_python, stdout=subprocess.DEVNULL) as process:
        start = time.monotonic()
        while not (log.exists() and log.read_text().count("main") == 2):
            assert time.monotonic() - start < 30, "both processes must start"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert time.monotonic() - start < 50, "before the processes would have ended"
    assert "late" not in log.read_text() and "niah" not in log.read_text()


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (("--configs=mamba2",), "--out"),
        (("--out=a", "--steps=3"), "--steps=3"),
        (("--out=a", "--jobs=0"), "--jobs=0"),
    ],
)
def test_bad_options_are_refused(args, option):
    result = launch(SCRIPT, *args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and option in result.stderr


def test_report_is_written_from_any_directory(tmp_path):
    """The current directory does not contain the package `lab`."""
    (line,) = [line for line in Path(SCRIPT).read_text().splitlines() if "-m lab.suite" in line]
    root = support.ROOT
    script = f'root={root}; out={tmp_path}/o; run() {{ "$@"; }}; {line}'
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert f"{tmp_path}/o has no directory with a run" in done.stderr
