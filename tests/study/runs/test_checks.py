"""Remarks on runs that differ in tokens, optimiser or schedule."""

import dataclasses

import pytest

from seqjax.errors import UserError
from seqjax.study.runs import checks
from tests.study.gaps.studies import TOKENS, run

ADAM = {"optim": {"b1": 0.9, "lr": 1e-3, "warmup_steps": 10}, "train": {"ends": [1.0]}}


def with_config(one, **changes):
    config = {group: ADAM.get(group, {}) | changes.get(group, {}) for group in ("optim", "train")}
    return dataclasses.replace(one, metadata={"config": config})


def test_equal_runs_have_no_remark():
    runs = [with_config(run("a")), with_config(run("b"), optim={"lr": 2e-3, "warmup_steps": 20})]
    assert checks.remarks(runs) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (with_config(run("other", tokens=TOKENS // 2)), f"{TOKENS // 2:,}: other"),
        (with_config(run("other"), optim={"b1": 0.95}), "b1 0.95: other"),
        (with_config(run("other"), optim={"name": "muon"}), "name muon: other"),
        (with_config(run("other"), train={"ends": []}), "linear: other"),
    ],
)
def test_each_difference_is_one_remark_with_models(changed, expected):
    (remark,) = checks.remarks([with_config(run("a")), changed])
    assert expected in remark and remark.count(". ") == 0


def test_old_configs_have_the_default_optimiser_and_schedule():
    old, new = with_config(run("a")), with_config(run("b"), optim={"name": "adam", "schedule": "linear"})
    assert checks.remarks([old, new]) == []
    muon = [with_config(one, optim={"name": "muon"}) for one in (run("a"), run("b"))]
    assert ["muon" in remark for remark in checks.remarks(muon)] == [True]
    assert checks.training({"optim": {"schedule": "cosine"}, "train": {}}).schedule == "cosine"


@pytest.mark.parametrize("changed", [{"optim": {"name": "muon"}}, {"train": {"ends": []}}])
def test_runs_of_one_model_need_one_optimiser_and_schedule(changed):
    runs = [with_config(run("a")), with_config(run("a", seed=1), **changed), with_config(run("b"), **changed)]
    configs = [(r.label, r.model, r.metadata["config"]) for r in runs]
    checks.require_one_training([("no config", "a", {}), *configs[1:]], "study.py")
    with pytest.raises(UserError, match=rf"^study\.py: '{runs[0].label}' and '{runs[1].label}' .*`model`"):
        checks.require_one_training(configs, "study.py")
    checks.require_one_training([(label, label, config) for label, _, config in configs], "study.py")


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", "a\tb"])
def test_name_with_control_characters_is_refused(name):
    with pytest.raises(UserError, match="control characters"):
        checks.require_plain(["fine", name], "study.py")
    checks.require_plain(["Mamba-2, $^$ | <b>, é"], "study.py")
