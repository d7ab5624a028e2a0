"""Joined studies: names, rates, and the reasons why runs do not join."""

import dataclasses
import json

import pytest

from seqjax.errors import UserError
from seqjax.study.judge import joined, plan
from seqjax.study.judge.plan import PUBLISHED, SAME_BLOCK
from tests.study.judge.conftest import DOMAINS, HIGH, LOW

ATTENTION = "transformer_pp:debug,model.mixer.qk_norm=True,model.mixer.conv=True"
MODELS = {"Attention": (ATTENTION, (LOW, HIGH), 2), "GLA": ("gla:debug", (LOW, HIGH), 1)}


@pytest.fixture
def read(trainer, tmp_path):
    """Read studies that join a judgement of Mamba-2."""

    def read_directories(*directories, config="mamba2:debug", **changes):
        judged_plan = plan.make_plan(config, out=tmp_path / "out", cache=tmp_path / "cache")
        arguments = {"name": "mamba2", "domains": judged_plan.domains, "against": judged_plan.against, "manifest": "m"}
        return joined.read(directories, judged_plan.config, judged_plan.references, **arguments | changes)

    return read_directories


def test_joined_models_are_renamed_and_rates_rescaled(read, lab):
    models = MODELS | {PUBLISHED: ("rwkv7:debug", (HIGH,), 1), "mamba2": ("mamba2:debug", (HIGH,), 1)}
    studies = read(lab(models))
    assert studies.records.models == [SAME_BLOCK, "GLA", f"{PUBLISHED} (lab)", "mamba2 (lab)"]
    assert {run.rate for run in studies.runs} == {4.0, 8.0}
    assert all(run.label.startswith("lab: ") for run in studies.runs)
    assert studies.n_slopes == 2 and not studies.has_slope
    assert [run.seed for run in studies.near(SAME_BLOCK)] == [0, 0, 1] and studies.near("none") == []


def test_missing_settings_count_as_defaults(read, lab):
    directory = lab(MODELS)
    text = json.loads((directory / "runs.json").read_text())
    for run in text["runs"].values():
        mixer = run["config"]["model"]["mixer"]
        mixer.pop("temperature", None)
        mixer["implementation"] = "xla"
    (directory / "runs.json").write_text(json.dumps(text))
    assert SAME_BLOCK in read(directory).records.models
    for run in text["runs"].values():
        run["config"]["model"]["mixer"].pop("conv", None)  # as an earlier version, which had no such setting
    (directory / "runs.json").write_text(json.dumps(text))
    models = read(directory).records.models
    assert SAME_BLOCK not in models and PUBLISHED in models
    for run in text["runs"].values():
        run["config"]["model"]["mixer"]["qk_norm"] = False
    (directory / "runs.json").write_text(json.dumps(text))
    assert not {SAME_BLOCK, PUBLISHED} & {*read(directory).records.models}


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ("", {"manifest": "other"}, "manifest m, here other"),
        ("", {"domains": ("arxiv", "book")}, "loss of book,"),
        (",train.steps=40", {}, "train.steps=40, here 20"),
        (",train.batch_size=2", {}, "train.batch_size=2, here 4"),
        (",eval.seed=1", {}, "eval.seed=1, here 0"),
        (",optim.name=muon", {}, "optim.name: 'muon' -> 'adam' here"),
        (",optim.b2=0.9", {}, "optim.b2: 0.9 -> 0.95 here"),
        (",optim.warmup_steps=3", {}, "optim.warmup_steps: 3 -> "),
    ],
)
def test_study_with_other_data_or_optimiser_is_refused(read, lab, settings, changes, reason):
    directory = lab(MODELS, settings=settings)
    with pytest.raises(UserError, match=f"--runs={directory}: Attention, .*{reason}"):
        read(directory, **changes)


def test_mismatched_runs_do_not_join(read, lab):
    directory = lab(MODELS)
    text = json.loads((directory / "runs.json").read_text())
    for label, run in text["runs"].items():
        if label.startswith("GLA"):
            run["config"]["optim"]["b1"] = 0.5
    (directory / "runs.json").write_text(json.dumps(text))
    studies = read(directory)
    assert studies.records.models == [SAME_BLOCK]
    assert studies.remarks[0].startswith(f"2 runs of {directory} do not join: GLA")


def test_reference_without_early_ends_is_trained_again(read, lab):
    studies = read(lab(MODELS, ends=(0.8, 1.0)))
    assert studies.records.models == ["GLA"] and "no ends from 50%" in studies.remarks[0]


def test_edited_files_and_repeated_directories_are_refused(read, lab):
    directory = lab(MODELS)
    with pytest.raises(UserError, match=r"^--runs: "):
        read(directory, directory)
    path = directory / "points.csv"
    path.write_text(path.read_text().replace("github,4.", "github,5.", 1))
    with pytest.raises(UserError, match=r"points\.csv has github"):
        read(directory)


def test_two_studies_join(read, lab):
    studies = read(lab(MODELS), lab({"DeltaNet": ("deltanet:debug", (LOW, HIGH), 1)}, name="more"))
    assert studies.has_slope and studies.records.domains == DOMAINS[2:]
    assert {path.name: len(runs) for path, runs in studies.by_directory.items()} == {"lab": 5, "more": 2}
    assert dataclasses.asdict(studies)["remarks"] == ()
