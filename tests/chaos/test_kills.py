"""Some kills of `tests.chaos.kills`, and interrupts during compilation."""

import random
import signal
import subprocess
import sys
import time

import pytest

from tests import support
from tests.chaos.kills import CASES, TRAINING, sweep


@pytest.mark.slow
def test_killed_runs_equal_uninterrupted_runs(tmp_path):
    """Kill runs on each corpus in each phase; the stream also with a data worker."""
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed: {seed}\n")
    total = sweep(
        tmp_path, kills=18, seed=seed, cases=[case for case in CASES if case.workers == 0 or case.corpus == "stream"]
    )
    assert total.total() == 18
    assert {"preparation", "compilation"} <= set(total) <= {*TRAINING, "preparation"}


@pytest.mark.slow
def test_interrupt_during_compilation_ends_the_run(blocks_dir, tmp_path):
    """A normal Python exit would destroy objects of the compiling thread: a segmentation fault."""
    settings = {"model__dim": 64, "model__n_layers": 6}
    environment = support.environment(optimised=True)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # compilation then takes seconds
    args = support.command(blocks_dir, tmp_path / "run", "mamba2", **settings)
    process = subprocess.Popen(args, env=environment, cwd=support.ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("Training" in line for line in process.stderr)
        while process.poll() is None:  # repeated, because a garbage-collector callback swallows an interrupt
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert stderr.endswith("Interrupted.\n")
    assert support.n_rows(tmp_path / "run") == 0, "the interrupt came after the compilation"
    assert not (tmp_path / "run" / "run.lock").exists()
