"""lab/suite/suite.sh: what it would start, and what it refuses."""

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


def test_the_suite_trains_looks_at_and_compares_every_config():
    lines = launch(SCRIPT, "--dry_run", "--out=a b", "--configs=mamba2,rwkv7", "--config.train.steps=3").stdout
    first, needle, tasks, second, *_, recall, page = [shlex.split(line)[4:] for line in lines.splitlines()]
    assert first == ["--config=mamba2:demo", "--workdir=a b/mamba2", "--config.train.steps=3"]
    assert needle == ["--workdir=a b/mamba2", "--lengths=1024", "--samples=100", "--batch_size=32"]
    assert tasks == ["--workdir=a b/mamba2", "--tasks=local"]
    assert second[:2] == ["--config=rwkv7:demo", "--workdir=a b/rwkv7"]
    recalled = ["--size=demo", "--models=Transformer++;Top-1 Chunk, exact;Mamba-2", "--jobs=1", "--out=a b/recall"]
    assert recall == recalled and page == ["--out=a b"]


@pytest.fixture
def pretended(tmp_path) -> dict[str, str]:
    """An environment in which `python` writes its arguments and its GPU to a file, and fails at a config `bad`."""
    said = tmp_path / "said"
    script = f"""#!/bin/sh
echo "$2 ${{3#--}} gpu $CUDA_VISIBLE_DEVICES $XLA_PYTHON_CLIENT_MEM_FRACTION" >> '{said}'
case "$*" in *config=bad*) echo it is bad; exit 3 ;; *config=long*) sleep 60; echo late >> '{said}' ;; esac
"""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(script)
    python.chmod(0o755)
    return {"PATH": f"{python.parent}:{os.environ['PATH']}"}


def test_the_suite_gives_jobs_at_a_time_a_gpu_each_or_a_share(tmp_path, pretended):
    result = launch(
        SCRIPT, f"--out={tmp_path}/o", "--configs=a,b,c", "--jobs=3", CUDA_VISIBLE_DEVICES="4,7", **pretended
    )
    assert result.returncode == 0, result.stderr
    said = (tmp_path / "said").read_text().splitlines()
    assert sorted(line for line in said if line.startswith("seqjax.main")) == [
        "seqjax.main config=a:demo gpu 4 .45",
        "seqjax.main config=b:demo gpu 7 .45",
        "seqjax.main config=c:demo gpu 4 .45",
    ]
    assert sum("evals.niah" in line for line in said) == 3 and len(said) == 11
    assert said[-2].startswith("seqjax.evals.recall size=demo gpu 4,7")
    assert "+ python -m seqjax.main --config=b:demo" in (tmp_path / "o" / "b.log").read_text()


def test_the_suite_says_which_config_failed_and_ends_the_others_first(tmp_path, pretended):
    result = launch(SCRIPT, f"--out={tmp_path}/o", "--configs=a,bad", "--jobs=2", **pretended)
    assert result.returncode == 1
    assert "it is bad" in result.stderr and "failed: bad;" in result.stderr
    said = (tmp_path / "said").read_text()
    assert said.count("niah") == 1 and "recall" not in said


@pytest.mark.usefixtures("heeded")
def test_a_stopped_suite_stops_what_it_started(tmp_path, pretended):
    command = ["bash", SCRIPT, f"--out={tmp_path}/o", "--configs=long,long2", "--jobs=2"]
    said = tmp_path / "said"
    with subprocess.Popen(command, env=os.environ | pretended, stdout=subprocess.DEVNULL) as process:
        start = time.monotonic()
        while not (said.exists() and said.read_text().count("main") == 2):
            assert time.monotonic() - start < 30, "both have started"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert time.monotonic() - start < 50, "sooner than the two would have ended"
    assert "late" not in said.read_text() and "niah" not in said.read_text()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--configs=mamba2",), "say where results go"),
        (("--out=a", "--steps=3"), "--steps=3 is not an option"),
        (("--out=a", "--jobs=0"), "--jobs=0 is not a number of processes"),
    ],
)
def test_what_is_missing_is_named(args, says):
    result = launch(SCRIPT, *args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and says in result.stderr


def test_the_page_is_written_from_any_directory(tmp_path):
    """Whose modules are not those of the clone, as after an installation."""
    (line,) = [line for line in Path(SCRIPT).read_text().splitlines() if "-m lab.suite" in line]
    root = support.ROOT
    script = f'root={root}; out={tmp_path}/o; run() {{ "$@"; }}; {line}'
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert f"{tmp_path}/o has no directory with a run" in done.stderr
