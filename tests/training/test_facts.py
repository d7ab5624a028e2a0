"""What identifies a run."""

import json

import jax

from seqjax.training.workdir import run_facts


def test_run_facts_identify_the_run():
    facts = json.loads(json.dumps(run_facts(manifest="abc")))
    assert facts["manifest"] == "abc"
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["devices"] == jax.device_count()
    assert "commit" in facts
