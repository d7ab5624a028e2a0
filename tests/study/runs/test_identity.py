"""Workdirs must hold the runs that a study defines; each run is distinct."""

import dataclasses
import json

import pytest

from seqjax.config import presets, to_dict
from seqjax.errors import UserError
from seqjax.study.judge.plan import read
from seqjax.study.runs import identity, train_run
from seqjax.study.runs.studies import load_study
from seqjax.training.loop import train
from tests import support
from tests.study.synthetic import write_run, write_study

CONFIG = "transformer_pp:debug"


def entry(workdir, settings="", **fields):
    config = f"{CONFIG},{settings}" if settings else CONFIG
    return {"workdir": str(workdir), "config": config} | fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workdir": "same"}, "same workdir"),
        ({"workdir": "./same/"}, "same workdir"),
        ({"config": CONFIG, "model": "other"}, "same settings"),
        ({"seed": 1}, "same settings"),
        ({"config": f"{CONFIG},train.seed=1", "seed": 1, "model": "slow"}, ""),
        ({"config": f"{CONFIG},data.seed=1", "model": "other"}, "data.seed"),
        ({"config": f"{CONFIG},optim.lr=0.5", "rate": 2.0, "model": "slow"}, "`rate`"),
    ],
)
def test_duplicate_runs_are_refused(change, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = {"slow": entry("same"), "second": entry("second") | change}
    path = write_study(tmp_path / "study.py", runs)
    if not message:
        assert len(load_study(str(path)).runs) == 2
        return
    with pytest.raises(UserError, match=message):
        load_study(str(path))


@pytest.mark.parametrize("name", presets.names("studies"))
def test_shipped_studies_are_accepted(name):
    assert load_study(name).runs


def test_missing_recorded_setting_has_its_default():
    plain, conv = (read(f"{CONFIG}{settings}") for settings in ("", ",model.mixer.conv=True"))
    recorded = to_dict(plain)
    del recorded["model"]["mixer"]["conv"]
    assert identity.changed(recorded, plain) == []
    assert identity.changed(recorded, conv) == ["model.mixer.conv: False -> True"]


def test_names_paths_backends_and_loops_over_layers_are_ignored():
    config = read(CONFIG)
    changes = {"name": "x", "size": "y"}
    other = dataclasses.replace(config, **changes, data=dataclasses.replace(config.data, path="elsewhere"))
    recorded = to_dict(other)
    recorded["model"]["mixer"]["implementation"] = "xla"
    recorded["model"]["scan_layers"] = not config.model.scan_layers
    assert identity.changed(recorded, config) == []


def test_foreign_mixer_is_compared_without_import(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("raise AssertionError('this code ran')")
    monkeypatch.syspath_prepend(tmp_path)
    recorded = to_dict(read(CONFIG))
    recorded["model"]["mixer"] = {"name": "stranger.Mixer", "width": 3}
    assert "model.mixer.name: 'stranger.Mixer' -> 'transformer_pp'" in identity.changed(recorded, read(CONFIG))


def test_workdir_with_other_settings_is_refused(tmp_path):
    """The study file was edited after the run had begun."""
    workdir = write_run(tmp_path / "run", [5.0, 4.0])
    (workdir / "config.json").write_text(json.dumps(to_dict(read(CONFIG))))
    path = write_study(tmp_path / "study.py", {"slow": entry(workdir)})
    assert identity.require(load_study(str(path)).runs[0]) is False  # the run has no identity
    for settings, setting in (
        ("optim.lr=0.5", "optim.lr"),
        ("train.seed=3", "train.seed"),
        ("model.dim=32", "model.dim"),
    ):
        write_study(path, {"slow": entry(workdir, settings)})
        with pytest.raises(UserError, match=f"slow: .*settings: .*{setting}"):
            identity.require(load_study(str(path)).runs[0])


def test_new_run_gets_the_recorded_data_hash(blocks_dir, tmp_path, monkeypatch):
    """The hash comes from a begun run on the same data."""
    settings = {"train__steps": 4, "eval__every": 0, "model__n_layers": 1}
    config = support.run_config(blocks_dir, "transformer_pp", **settings)
    assert train(config, tmp_path / "first") is True
    manifest = json.loads((tmp_path / "first" / "run.json").read_text())["manifest"]
    runs = {
        "slow": {"workdir": str(tmp_path / "first"), "config": to_dict(config)},
        "second": {"workdir": str(tmp_path / "second"), "config": to_dict(dataclasses.replace(config, name="x"))},
    }
    runs["second"]["config"]["train"]["seed"] = 1
    runs["other data"] = runs["second"] | {"workdir": str(tmp_path / "third")}
    runs["other data"]["config"] = json.loads(json.dumps(runs["second"]["config"]))
    runs["other data"]["config"]["data"] |= {"corpus": "builtin", "path": ""}
    path = write_study(tmp_path / "study.py", runs)
    seen = []
    monkeypatch.setattr(train_run, "train", lambda config, workdir, *, manifest: bool(seen.append(manifest)))
    for index in range(3):
        train_run.train_one(str(path), index)
    assert seen == [manifest, manifest, ""]
