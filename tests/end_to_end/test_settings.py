"""Every setting of a run takes effect: a run in which all differ from the defaults, against expected values."""

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest

from seqjax.config import OptimConfig
from seqjax.data import open_corpus
from seqjax.training import metrics
from tests import support
from tests.end_to_end.conftest import SETTINGS, STEPS, Run
from tests.end_to_end.reference import Reference

LOGGED = ("train/loss", "train/grad_norm", "train/param_norm", "train/lr")
TOLERANCE = 2e-4


def table(rows) -> np.ndarray:
    """Return the logged values [steps, logged]."""
    return np.array([[row[name] for name in LOGGED] for row in rows])


def opened(config):
    return open_corpus(config.data, seq_len=support.SEQ_LEN, vocab_size=config.model.vocab_size)


def batches(config) -> list[np.ndarray]:
    iterator = opened(config).train_iterator(batch_size=config.train.batch_size)
    rows = [next(iterator)["tokens"] for _ in range(config.train.steps)]
    iterator.close()
    return rows


@pytest.fixture(scope="module")
def reference(run: Run) -> Reference:
    return Reference(run.config)


@pytest.fixture(scope="module")
def expected(run: Run, reference: Reference) -> np.ndarray:
    return table(reference.follow(run.config, batches(run.config)))


def test_a_run_follows_its_settings(run: Run, expected: np.ndarray):
    """Loss, norms and learning rate of every step, and therefore also parameters and data of the previous step."""
    logged = table([row for row in metrics.read(run.workdir) if "train/lr" in row])
    np.testing.assert_allclose(logged, expected, rtol=TOLERANCE)


def replaced(config, **groups):
    return dataclasses.replace(config, **{g: dataclasses.replace(getattr(config, g), **v) for g, v in groups.items()})


# Only a run with train.ends uses `cooldown`: test_ends.py. The rest is in test_muon.py and test_schedule.py.
ELSEWHERE = ("cooldown", "name", "adam_lr", "muon_scale", "muon_momentum", "schedule")
FIELDS = [field for field in dataclasses.fields(OptimConfig) if field.name not in ELSEWHERE]
DEFAULTS = [{"optim": {field.name: field.default}} for field in FIELDS]
DEFAULTS += [{"train": {"seed": 0}}, {"data": {"seed": 0}}]


@pytest.mark.parametrize("change", DEFAULTS, ids=str)
def test_every_setting_matters(run: Run, reference: Reference, expected: np.ndarray, change):
    """The comparison above detects a setting that is not passed on: its default gives other numbers."""
    config = replaced(run.config, **change)
    assert config != run.config
    if "warmup_steps" in change.get("optim", {}):
        config = replaced(config, optim={"warmup_steps": STEPS})  # the default, 2,500, is longer than the run
    other = table(reference.follow(config, batches(config)))
    assert np.max(np.abs(other / expected - 1)) > 20 * TOLERANCE


def test_micro_batches_and_evaluation_batches_have_the_configured_sizes(run: Run):
    row = support.SEQ_LEN + 1
    assert set(run.batch_shapes) == {("train", (16 // 2, row)), ("eval", (12, row))}


def test_parameters_and_moments_follow_the_mesh(run: Run):
    """Adam's moments are two thirds of a run's state; they are split like their parameters."""
    params = {path.partition("]")[2]: x for path, x in run.saved.items() if path.startswith("['params']")}
    assert {axis for x in params.values() for axis in jax.tree.leaves(tuple(x.sharding.spec))} == {"fsdp", "tensor"}
    assert {tuple(x.sharding.mesh.shape.items()) for x in params.values()} == {
        (("data", 2), ("fsdp", 2), ("seq", 1), ("tensor", 2)),
    }
    for moment in ("mu", "nu"):
        found = {path.partition(f".{moment}")[2]: x for path, x in run.saved.items() if f".{moment}[" in path}
        assert found.keys() == params.keys()
        for path, x in found.items():
            assert x.sharding.is_equivalent_to(params[path].sharding, len(x.shape)), path


def test_the_profile_has_the_configured_steps(run: Run):
    """Steps 3 and 4. Logging lags one step behind the device until the profile is closed."""
    assert run.profile == [("start", 1), ("stop", 4)]


def test_the_sample_has_the_configured_length(run: Run):
    text = (run.workdir / "report.md").read_text()
    found = re.search(r"^(`{3,})text\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    sample = found[2]
    assert sample.startswith("The ")
    assert 0 < len(sample) - len("The ") <= SETTINGS["log__sample_tokens"]


def test_no_events_without_tensorboard(run: Run):
    assert not run.config.log.tensorboard
    assert not (run.workdir / "tensorboard").exists()


def test_the_rate_is_tokens_per_second(run: Run):
    rows = [row for row in metrics.read(run.workdir) if "tokens_per_s" in row]
    for a, b in itertools.pairwise(rows):
        assert b["tokens_per_s"] * (b["seconds"] - a["seconds"]) == pytest.approx(16 * support.SEQ_LEN, rel=1e-6)
