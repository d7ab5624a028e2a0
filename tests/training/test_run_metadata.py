"""What identifies a run."""

import json

import jax

from seqjax.training.workdir import run_metadata


def test_run_metadata_identifies_the_run():
    metadata = json.loads(json.dumps(run_metadata(manifest="abc")))
    assert metadata["manifest"] == "abc"
    assert metadata["versions"]["jax"] == jax.__version__
    assert metadata["devices"] == jax.device_count()
    assert "commit" in metadata
