"""A few of the kills of `tests.end_to_end.kills`; its command makes as many as are asked for."""

import random
import sys

import pytest

from tests.end_to_end.kills import CASES, TRAINING, sweep


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
