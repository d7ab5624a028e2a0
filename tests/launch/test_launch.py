"""The launch scripts: printed commands of dry runs, and rejected arguments."""

import os
import re
import shlex
import subprocess

import pytest

from tests import support

LAUNCH = support.ROOT / "launch"
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # an imported benchmark may set these


def launch(script: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in GPU_VARIABLES} | environment
    return subprocess.run(
        ["bash", str(LAUNCH / script), *args], env=env, capture_output=True, text=True, check=False, timeout=60
    )


def dry_run_commands(script: str, *args: str, **environment: str) -> list[list[str]]:
    """Return the words of each command that a dry run prints."""
    result = launch(script, "--dry_run", *args, **environment)
    assert result.returncode == 0, result.stderr
    return [shlex.split(line) for line in result.stdout.splitlines()]


RUN = ("--config=top1_chunk:110m", "--workdir=runs/a b", "--config.train.steps=9")


def test_local_uses_the_requested_gpus():
    (command,) = dry_run_commands("local.sh", *RUN)
    assert command == ["env", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92", "python", "-m", "seqjax.main", *RUN]
    (command,) = dry_run_commands("local.sh", "--gpus=4", *RUN)
    assert command[2] == "CUDA_VISIBLE_DEVICES=0,1,2,3"
    (command,) = dry_run_commands("local.sh", "--gpus=2", *RUN, CUDA_VISIBLE_DEVICES="3,5,7")
    assert command[2] == "CUDA_VISIBLE_DEVICES=3,5"


def test_slurm_commands_for_a_run_and_a_study_array():
    (command,) = dry_run_commands("slurm.sbatch", *RUN)
    assert command == ["srun", "--kill-on-bad-exit=1", "python", "-m", "seqjax.main", "--distributed", *RUN]
    (command,) = dry_run_commands("slurm_study.sbatch", "--study=my.py:small", SLURM_ARRAY_TASK_ID="7")
    assert command == ["srun", "python", "-m", "seqjax.study", "--study=my.py:small", "--only=7"]
    (command,) = dry_run_commands(
        "slurm_study.sbatch", "--study=my.py:small", SLURM_ARRAY_TASK_ID="7", SLURM_NTASKS="16"
    )
    several = ["srun", "--kill-on-bad-exit=1", "python", "-m", "seqjax.study.runs.train_run", "--distributed"]
    assert command == [*several, "--study=my.py:small", "--run=7"]


def test_slurm_default_workdir_has_the_job_id():
    (command,) = dry_run_commands("slurm.sbatch", RUN[0], SLURM_JOB_ID="42")
    assert command[-2:] == [RUN[0], "--workdir=runs/slurm-42"]


def test_tpu_vm_creates_installs_and_trains_on_all_workers():
    machine = ("--name=n", "--zone=z", "--type=v5litepod-16", "--version=v2", "--wheel=dist/seqjax-1-py3-none-any.whl")
    create, copy, install, train, advice = dry_run_commands("tpu_vm.sh", *machine, "--", *RUN)
    tpu = ["gcloud", "compute", "tpus", "tpu-vm"]
    assert create == [*tpu, "create", "n", "--zone=z", "--accelerator-type=v5litepod-16", "--version=v2"]
    assert copy == [*tpu, "scp", "dist/seqjax-1-py3-none-any.whl", "n:/tmp/", "--zone=z", "--worker=all"]
    assert install[:8] == train[:8] == [*tpu, "ssh", "n", "--zone=z", "--worker=all"]
    assert shlex.split(install[-1])[-1] == "/tmp/seqjax-1-py3-none-any.whl[tpu]"
    assert shlex.split(train[-1])[1:] == ["-m", "seqjax.main", "--distributed", "--start_timeout=600", *RUN]
    assert "delete" in advice


@pytest.mark.parametrize("word", ["a b", "a'; touch x; 'b", '$(touch x) `touch x` "', "a\tb", "é", "*", "a\\'b", "-n"])
def test_arguments_survive_the_remote_shell(word, tmp_path):
    """A remote machine or a pod parses the command again, with sh or a larger shell."""
    run = (*RUN, f"--config.data.path={word}")
    wheel = f"--wheel=dist/{word}.whl"
    tpu_vm = launch("tpu_vm.sh", "--name=n", "--zone=z", "--type=t", "--version=v", wheel, "--dry_run", "--", *run)
    job_options = ("--cluster=c", "--workload=w", "--device=d", "--image=i")
    gke = launch("gke.sh", *job_options, "--dry_run", "--", *run)

    def parsed(line: str) -> list[str]:
        """Return the arguments in the last word of a printed command, parsed by sh."""
        text = bash_words(line)[-1].rpartition("pip install ")[2].rpartition("--start_timeout=600 ")[2]
        script = f"set -- {text}; for word; do printf '%s\\0' \"$word\"; done"
        done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1]

    install, train = tpu_vm.stdout.splitlines()[2:4]
    assert parsed(install) == [f"/tmp/{word}.whl[tpu]"]
    assert parsed(train) == parsed(gke.stdout) == list(run)
    assert not list(tmp_path.iterdir())


def bash_words(line: str) -> list[str]:
    """Return the words of a line that `printf %q` printed."""
    script = f"for word in {line.removesuffix(chr(10))}\ndo printf '%s\\0' \"$word\"; done"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("v5litepod-8", ["--tpu-type=v5litepod-8", "--num-slices=2"]),
        ("h100-80gb-8", ["--device-type=h100-80gb-8", "--num-nodes=2"]),
    ],
)
def test_gke_requests_tpus_or_gpus(device, kind):
    job_options = ("--cluster=c", "--workload=w", f"--device={device}", "--image=i", "--slices=2")
    (command,) = dry_run_commands("gke.sh", *job_options, "--", *RUN)
    assert command[:3] == ["xpk", "workload", "create"]
    assert [word for word in command if word in kind] == kind
    words = ["python", "-m", "seqjax.main", "--distributed", "--start_timeout=600", *RUN]
    assert shlex.split(command[-1]) == words


@pytest.mark.parametrize(
    ("script", "args", "word"),
    [
        ("local.sh", (), "launch/local.sh --config="),
        ("local.sh", ("--gpus=two", *RUN), "--gpus=two is"),
        ("slurm.sbatch", RUN[1:], "--config= is missing"),
        ("slurm_study.sbatch", (), "--study=configs/studies/limited_110m.py"),
        ("slurm_study.sbatch", ("--study=my.py",), "sbatch --array=0-60"),
        ("tpu_vm.sh", ("--name=n", "--", *RUN), "--zone= is missing"),
        ("tpu_vm.sh", ("--config=a",), "--config=a is unknown"),
        ("gke.sh", ("--cluster=c", "--workload=w", "--device=d", "--image=i"), "after --"),
    ],
)
def test_missing_options_are_named(script, args, word):
    result = launch(script, *args)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert word in result.stderr
    assert result.stdout == ""


def test_too_many_gpus_are_rejected():
    result = launch("local.sh", "--gpus=2", "--dry_run", *RUN, CUDA_VISIBLE_DEVICES="3")
    assert result.returncode == 2
    assert "names 1" in result.stderr


def test_image_contains_all_packages():
    text = (LAUNCH / "Dockerfile").read_text()
    packages = re.findall(r'": "([\w/]+)"', (support.ROOT / "setup.py").read_text())  # package_dir
    assert "configs" in packages
    for package in ("seqjax", "kernels_pallas", *packages):
        assert f"COPY {package} ./{package}" in text
        assert (support.ROOT / package).is_dir()
    for name in ("constraints/py3.12.txt", "pyproject.toml", "README.md", "LICENSE"):
        assert name in text
        assert (support.ROOT / name).is_file()


def test_all_launchers_are_documented():
    page = (support.ROOT / "docs" / "launch.md").read_text()
    for path in LAUNCH.iterdir():
        assert f"launch/{path.name}" in page
