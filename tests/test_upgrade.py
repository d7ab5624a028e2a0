"""Runs of earlier versions: their settings mean the same today, their parameters are found, later ones are refused.

golden/configs_version_1.json holds what version 1 wrote as `config.json`, each under what asks for the same today.
"""

import json

import pytest

from seqjax import presets, upgrade
from seqjax.config import from_config_dict, to_dict
from seqjax.errors import UserError
from seqjax.study.studies import load_study
from seqjax.training import workdir as workdirs
from tests import support

OLD = json.loads((support.ROOT / "tests" / "golden" / "configs_version_1.json").read_text())
BASED = "based:110m,mixed,train.accumulate=16,train.per_device_batch_size=None"


def of(values, name="config.json"):
    return from_config_dict(upgrade.upgrade_config(values, where=name))


@pytest.mark.parametrize("today", OLD)
def test_a_config_of_version_1_means_what_it_meant(today, tmp_path):
    want = from_config_dict(presets.read_config(today))
    text = json.dumps(OLD[today], indent=2) + "\n"
    (tmp_path / "config.json").write_text(text)
    assert workdirs.load_config(tmp_path) == want
    assert (tmp_path / "config.json").read_text() == text, "reading leaves the file as it is"
    workdirs.save_config(tmp_path, want)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.pop("version") == upgrade.VERSION
    assert written == to_dict(want)
    assert workdirs.load_config(tmp_path) == want


def test_the_old_files_hold_what_changed():
    """A test of the test: without the upgrade none of them loads."""
    for values in OLD.values():
        with pytest.raises(UserError, match="config"):
            from_config_dict(values)


def test_another_run_is_told_from_an_old_one(tmp_path):
    today = "top1_chunk:debug,model.mixer.selection=approx,data.path=x"
    (tmp_path / "config.json").write_text(json.dumps(OLD[today]))
    other = from_config_dict(presets.read_config(today, [("model.mixer.kv_heads", "1"), ("data.path", "y")]))
    with pytest.raises(UserError, match=r"another config: model\.mixer\.kv_heads: None -> 1\. Give"):
        workdirs.save_config(tmp_path, other)


def mixer_of(**old):
    values = json.loads(json.dumps(OLD["ablations/position_alibi:debug"]))
    values["model"]["mixer"] |= old
    return of(values).model.mixer


def test_no_rotation_was_a_base_of_zero():
    assert mixer_of(rope_base=0.0).position == "alibi"
    assert mixer_of(rope_base=0.0, position="rope").position == "none"
    assert mixer_of(rope_base=5.0, position="rope").rope_base == 5.0


def test_what_was_set_stays():
    assert mixer_of(kv_heads=1, head_dim=16, window=3, temperature=0.5).window == 3
    assert mixer_of(kv_heads=1).kv_heads == 1
    assert mixer_of().kv_heads is None


def test_zero_stays_where_it_is_a_number():
    values = OLD["top1_chunk:debug,model.mixer.selection=approx,data.path=x"]
    config = of(values | {"eval": values["eval"] | {"every": 0}, "optim": values["optim"] | {"weight_decay": 0}})
    assert (config.eval.every, config.optim.weight_decay, config.data.workers) == (0, 0.0, 0)


@pytest.mark.parametrize("version", [1, 2])
def test_micro_batches_stay_where_there_were_several(version):
    """One was the default, which is None today; without a limit per device it means the same on any devices."""
    values = json.loads(json.dumps(OLD["rwkv7:debug,model.mixer.eta_rank=8"])) if version == 1 else as_version_2()
    assert of(values).train.accumulate is None
    values["train"]["accumulate"] = 2
    assert (of(values).train.accumulate, of(values).train.per_device_batch_size) == (2, None)


def test_the_runs_of_a_study_go_on_in_the_workdirs_that_they_left(tmp_path):
    """What was recorded of them, by earlier versions, against what the study asks for today."""
    recorded = json.loads((support.ROOT / "docs/results/limited_110m/runs.json").read_text())["runs"]
    asked = {run.label: run.config for run in load_study("limited_110m").runs}
    assert len(recorded.keys() & asked.keys()) > 40
    for label in recorded.keys() & asked.keys():
        (tmp_path / "config.json").write_text(json.dumps(recorded[label]["config"]))
        workdirs.check_config(tmp_path, asked[label])
        assert workdirs.load_config(tmp_path).train.batch_size == asked[label].train.batch_size == 32


def as_version_2():
    values = to_dict(from_config_dict(presets.read_config("rwkv7:debug")))
    del values["train"]["per_device_batch_size"]
    values["train"]["accumulate"] = 1
    return {"version": 2, **values}


def test_one_micro_batch_that_was_asked_for_today_stays(tmp_path):
    workdirs.save_config(tmp_path, asked := from_config_dict(presets.read_config("rwkv7:110m,train.accumulate=1")))
    assert workdirs.load_config(tmp_path) == asked
    assert (asked.train.accumulate, asked.train.per_device_batch_size) == (1, 16)


@pytest.mark.parametrize("today", ["based:110m,mixed", BASED.replace("16", "8")])
def test_an_old_run_goes_on_with_other_micro_batches(today, tmp_path):
    """The command that started it asks for them otherwise now; the batch of a step stays the same."""
    (tmp_path / "config.json").write_text(json.dumps(OLD[BASED]))
    workdirs.check_config(tmp_path, from_config_dict(presets.read_config(today)))
    with pytest.raises(UserError, match=r"another config: train\.batch_size: 256 -> 128\. Give"):
        workdirs.check_config(tmp_path, from_config_dict(presets.read_config(today, [("train.batch_size", "128")])))


def test_the_pattern_won_over_the_mixer():
    config = of(OLD[BASED])
    assert [m.name for m in config.model.mixers].count("based_conv") == 3
    assert config.model.mixer_names == "based_conv, based_linear, transformer_pp"
    values = OLD[BASED]
    one = of(values | {"model": values["model"] | {"pattern": values["model"]["pattern"][2:3]}})
    assert one.model.mixer == config.model.mixers[2], "a pattern of one is one"


@pytest.mark.parametrize(
    ("version", "says"),
    [(upgrade.VERSION + 1, "written by a later seqjax.*Update"), ("2", "is no number"), (0, "is no"), (True, "is no")],
)
def test_a_version_that_is_not_known(version, says, tmp_path):
    values = to_dict(from_config_dict(presets.read_config("mamba2:debug")))
    (tmp_path / "config.json").write_text(json.dumps({"version": version, **values}))
    with pytest.raises(UserError, match=f"{tmp_path}/config.json.*{says}"):
        workdirs.load_config(tmp_path)


def test_what_is_no_config_of_any_version_is_told():
    for values in ({"model": 3}, {"model": {"mixer": 3}}, {"model": {"pattern": [3]}}, {"optim": None}):
        with pytest.raises(UserError, match="config"):
            of(values)
