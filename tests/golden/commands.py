"""Runs commands as `python -m MODULE ARGUMENT ...` does, many for one start of Python.

Importing JAX and the libraries around it takes as long as a tiny run. So one process imports the libraries (nothing
of this repository), and every command runs in a fork of it, under `runpy`, with its own flags, devices and programs.
Only the documented commands are used, so what is tested through here does not depend on the names of modules inside.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
LIBRARIES = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "grain", "ml_collections.config_flags", "tensorboardX")
# Programs that hardly run are better compiled fast. The second flag keeps products of matrices out of fused calls to a
# library that gets some of them wrong (kernels_pallas); given here, nothing in the package has a reason to add it.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
)


class Result(NamedTuple):
    """What a command left."""

    status: int
    stdout: str
    stderr: str


def run(
    commands: Sequence[Sequence[str]], *, flags: str = XLA_FLAGS, jobs: int = 1, timeout: int = 550
) -> list[Result]:
    """Run each [MODULE, ARGUMENT, ...] from the root of the repository on one CPU device, `jobs` at a time."""
    environment = {key: value for key, value in os.environ.items() if key != "SEQJAX_TEST_GPU"}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as directory:
        plan = json.dumps({"commands": [list(c) for c in commands], "directory": directory, "jobs": jobs})
        driver = [sys.executable, "-m", "tests.golden.commands"]
        subprocess.run(driver, input=plan, text=True, cwd=ROOT, env=environment, check=True, timeout=timeout)
        return [
            Result(*(_read(Path(directory) / f"{i}.{name}") for name in Result._fields)) for i in range(len(commands))
        ]


def run_each(commands: Sequence[Sequence[str]], **options) -> list[Result]:
    """As `run`; raises `RuntimeError` with what was said where a command failed."""
    results = run(commands, **options)
    for command, result in zip(commands, results, strict=True):
        if result.status:
            raise RuntimeError(f"{' '.join(command)} ended with status {result.status}:\n{result.stderr[-4000:]}")
    return results


def _read(path: Path):
    text = path.read_text()
    return int(text) if path.suffix == ".status" else text


def _main() -> None:
    plan = json.load(sys.stdin)
    for name in LIBRARIES:
        importlib.import_module(name)
    waiting = list(enumerate(plan["commands"]))
    running: dict[int, Path] = {}
    while waiting or running:
        if waiting and len(running) < plan["jobs"]:
            index, command = waiting.pop(0)
            place = Path(plan["directory"]) / str(index)
            running[_start(command, place)] = place
        else:
            process, status = os.wait()
            running.pop(process).with_suffix(".status").write_text(str(os.waitstatus_to_exitcode(status)))


def _start(command: Sequence[str], place: Path) -> int:
    """The process that runs `command`, its output in files beside `place`."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        for stream, name in ((1, ".stdout"), (2, ".stderr")):
            os.dup2(os.open(place.with_suffix(name), os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = list(command)
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _main()
