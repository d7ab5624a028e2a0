"""A few of the kills of `tests.chaos.kills`; its command makes as many as are asked for."""

import random
import signal
import subprocess
import sys
import time

import pytest

from tests import support
from tests.chaos.kills import CASES, TRAINING, sweep


@pytest.mark.slow
def test_killed_runs_equal_those_left_alone(tmp_path):
    """Of every corpus, in every phase of a run, with a data worker and without."""
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed: {seed}\n")
    total = sweep(
        tmp_path, kills=18, seed=seed, cases=[case for case in CASES if case.workers == 0 or case.corpus == "stream"]
    )
    assert total.total() == 18
    assert {"preparation", "compilation"} <= set(total) <= {*TRAINING, "preparation"}


@pytest.mark.slow
def test_interrupts_while_xla_compiles_end_a_run(blocks_dir, tmp_path):
    """Python's usual end would destroy what the compiling thread uses, which was a segmentation fault."""
    settings = {"model__dim": 64, "model__n_layers": 6}
    environment = support.environment(optimised=True)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # compiled for seconds, every time
    args = support.command(blocks_dir, tmp_path / "run", "mamba2", **settings)
    process = subprocess.Popen(args, env=environment, cwd=support.ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("Training" in line for line in process.stderr)
        while process.poll() is None:  # Python swallows one that hits a callback of its garbage collector
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert stderr.endswith("Interrupted.\n")
    assert support.n_rows(tmp_path / "run") == 0, "no longer compiling: the machine was faster"
    assert not (tmp_path / "run" / "run.lock").exists()
