"""Which checkpoints stay."""

import numpy as np
import pytest

from seqjax.errors import UserError
from seqjax.training.checkpoint import Checkpoints
from tests import support


@pytest.mark.parametrize(
    ("options", "want"),
    [({"keep": 2}, [6, 7]), ({"keep": 2, "keep_period": 3}, [3, 6, 7]), ({"keep": 1, "keep_period": 2}, [2, 4, 6, 7])],
)
def test_the_newest_stay_and_those_of_the_period(tmp_path, options, want):
    checkpoints = Checkpoints(tmp_path, **options)
    for step in range(1, 8):
        checkpoints.save_params(step, {"w": np.full(2, step, np.float32)})
    checkpoints.wait()
    checkpoints.close()
    assert support.checkpoint_steps(tmp_path) == want


def test_the_period_must_be_one_of_saved_steps(blocks_dir):
    """Settings of a run: every 5 steps."""
    assert support.run_config(blocks_dir).checkpoint.keep_period is None
    assert support.run_config(blocks_dir, checkpoint__keep_period=10).checkpoint.keep_period == 10
    for settings in ({"checkpoint__keep_period": 12}, {"checkpoint__keep_period": 10, "checkpoint__every": 0}):
        with pytest.raises(
            UserError, match=r"keep_period=1. keeps what is saved.*multiple of config\.checkpoint\.every"
        ):
            support.run_config(blocks_dir, **settings)
