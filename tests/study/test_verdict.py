"""The answer in words says what the numbers say; one gap of the mean at the lowest common loss in each study."""

import pytest

from seqjax.study import __main__ as study
from seqjax.study import records, tables
from seqjax.study.verdict import in_words, verdict
from seqjax.utils import UserError
from tests.study.synthetic import write_run, write_study

pytestmark = pytest.mark.usefixtures("undrawn_pictures")


@pytest.fixture
def build(tmp_path):
    """Returns the records of a study of runs: label -> (losses in domain, options of `write_run`, fields)."""

    def build(runs) -> records.Records:
        entries = {
            label: {"workdir": str(write_run(tmp_path / label, losses, **options)), **fields}
            for label, (losses, options, fields) in runs.items()
        }
        path = write_study(tmp_path / "study.py", entries)
        study.main([f"--study={path}", f"--out={tmp_path / 'out'}"])
        return records.read(tmp_path / "out")

    return build


SLOW = {"slow": ([4.0, 3.0, 2.0], {"noise": 0}, {})}


def test_what_costs_what_gains_and_what_cannot_be_told(build):
    found = build(
        SLOW
        | {
            "worse": ([4.0, 3.0, 2.1], {"noise": 1, "offset": {"arxiv": 0.4, "github": 0.2}}, {}),
            "better": ([4.0, 3.0, 1.9], {"noise": 2, "offset": -0.3}, {}),
            "same": ([4.0, 3.0, 2.0], {"noise": 3, "offset": 0.001}, {}),
            "unsure": ([4.0, 3.0, 2.0], {"blocks": False, "offset": 0.3}, {}),
            "apart": ([9.0, 8.0], {"noise": 4}, {}),
        }
    )
    said = {model: verdict(found, model, "slow") for model in ("worse", "better", "same", "unsure", "apart")}
    assert said["worse"].startswith("Yes, it costs in these two runs. At a loss in domain of 2.100 nats per token")
    assert "worse is 0.300 ± " in said["worse"]
    assert " nats per token worse out of domain than slow (mean, equal). By domain: arxiv +0.400 ± " in said["worse"]
    assert "In domain worse ends at 2.100, slow at 2.000." in said["worse"]
    assert "there is one seed" in said["worse"]
    assert said["worse"].endswith("Whether the learning rate or its schedule is behind it was not tested.")
    assert said["better"].startswith("No, it gains in these two runs. At a loss in domain of 2.000")
    assert "better is 0.300 ± " in said["better"] and " nats per token better out of domain" in said["better"]
    assert said["same"].startswith("The two cannot be told apart.")
    assert "tested" not in said["same"]
    assert said["unsure"].startswith("How sure it is, is not known.")
    assert "unsure is 0.300 nats per token worse" in said["unsure"]
    assert said["unsure"].endswith("The losses of single blocks were not kept, so there is no interval.")
    assert said["apart"].startswith("It cannot be said: no seed of apart and slow passed through a common loss")
    groups = in_words(found, "slow")
    assert [(words.split(".")[0], models[0].split(" ")[0]) for words, models in groups.items()] == [
        ("No, it gains in these two runs", "better"),
        ("The two cannot be told apart", "same"),
        ("Yes, it costs in these two runs", "worse"),
        ("How sure it is, is not known", "unsure"),
        ("It cannot be said: no common loss in domain", "apart"),
    ]


def test_seeds_and_a_learning_rate_that_closes_the_gap(build):
    runs = {}
    for seed in range(3):
        runs |= {
            f"slow{seed}": ([4.0, 3.0, 2.0], {"noise": seed}, {"model": "slow", "seed": seed}),
            f"x{seed}": ([4.0, 3.0, 2.0], {"noise": seed, "offset": 0.3}, {"model": "x", "seed": seed}),
        }
    found = build(runs | {"x, 3": ([4.0, 3.0, 1.9], {"noise": 0}, {"model": "x", "rate": 3})})
    said = verdict(found, "x", "slow")
    assert said.startswith("Yes, it costs. ")
    assert "over documents and 3 seeds." in said
    assert "The gap is closed by the learning rate: each at its best learning rate it is " in said


def test_models_that_the_study_has_not_are_named(build):
    found = build(SLOW | {"x": ([4.0, 3.0, 2.0], {}, {})})
    for ask in (lambda: verdict(found, "y", "slow"), lambda: tables.gap_table(found, "y")):
        with pytest.raises(UserError, match=r"The study has no model 'y'\. Its models: slow; x\."):
            ask()
    with pytest.raises(UserError, match=r"slow is compared with itself; name another reference of slow\."):
        verdict(found, "slow", "slow")
