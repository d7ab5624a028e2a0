"""A judgement's configs and runs."""

import dataclasses
import hashlib
import json
import re
from types import SimpleNamespace

import pytest

from seqjax.config import from_config_dict, to_dict
from seqjax.errors import UserError
from seqjax.mixers import _registry
from seqjax.study.judge import plan
from seqjax.study.judge.plan import PUBLISHED, SAME_BLOCK, Runs
from seqjax.study.runs.studies import ENDS
from seqjax.training.identity import without_added
from tests import support
from tests.study.judge.conftest import HIGH, LOW


def plan_for(tmp_path, config="mamba2:debug", **options):
    return plan.make_plan(config, out=tmp_path / "out", cache=tmp_path / "cache", **options)


def test_references_share_settings_but_not_the_model(trainer, tmp_path):
    changes = "train.batch_size=8,eval.tokens=512,optim.b2=0.9,optim.clip_norm=None,model.dim=32,model.n_layers=1"
    judged_plan = plan_for(tmp_path, f"mamba2:debug,{changes},data.eval_domains=('prose','python')")
    config = from_config_dict(judged_plan.entry(SAME_BLOCK, HIGH, seed=1)["config"])
    assert (config.train.batch_size, config.eval.tokens, config.optim.b2, config.optim.clip_norm) == (8, 512, 0.9, None)
    assert config.data.eval_domains == ("prose", "python")
    assert (config.model.dim, config.model.n_layers) == (64, 2)
    assert config.model.mixer.qk_norm and config.model.mixer.conv
    assert not judged_plan.references[PUBLISHED].model.mixer.conv
    assert config.optim.lr == HIGH and config.train.ends == ENDS
    assert config.train.seed == config.data.seed == 1
    assert (config.eval.every, config.checkpoint.ends, config.log.sample_tokens) == (0, "none", 0)
    mixer_config = plan.read(judged_plan.entry(judged_plan.model, LOW, seed=0)["config"])
    assert dataclasses.replace(mixer_config.data, seed=1) == config.data and mixer_config.eval == config.eval
    assert mixer_config.train.ends == ENDS


def test_demo_is_shortened_unless_steps_are_set(trainer, tmp_path):
    scale = plan.SCALES["demo"]
    demo_plan = plan_for(tmp_path, "mamba2")
    assert (demo_plan.config.train.steps, demo_plan.config.eval.tokens) == (scale.steps, scale.eval_tokens)
    assert demo_plan.references[PUBLISHED].train.steps == scale.steps
    assert plan_for(tmp_path, "mamba2:demo,train.steps=400").config.train.steps == 400


def test_reference_workdirs_depend_on_data_and_settings(trainer, tmp_path):
    def names(config, rate=HIGH):
        judged_plan = plan_for(tmp_path, config)
        return {judged_plan.entry(model, rate, seed=0)["workdir"] for model in judged_plan.references}

    usual = names("mamba2:debug")
    assert len(usual) == 2
    assert names("rwkv7:debug,model.dim=32") == usual
    for other in ("mamba2:debug,train.steps=40", "mamba2:debug,eval.tokens=512", "mamba2:debug,optim.b1=0.8"):
        assert not names(other) & usual, other
    assert not names("mamba2:debug", LOW) & usual
    trainer.corpus.manifest_hash = "other"
    assert not names("mamba2:debug") & usual


def test_muon_needs_learning_rates_and_is_the_references_optimiser(trainer, tmp_path):
    """The recorded rates are Adam's."""
    text = "mamba2:debug,optim.name=muon,optim.adam_lr=1e-3"
    with pytest.raises(UserError, match=r"config\.optim\.name='muon'.*--rates=A,B"):
        plan_for(tmp_path, text)
    judged_plan = plan_for(tmp_path, text, rates=(0.01, 0.02))
    for config in judged_plan.references.values():
        assert config.optim == judged_plan.config.optim and config.optim.name == "muon"
    adam = plan_for(tmp_path).references[SAME_BLOCK]
    workdirs = [plan.workdir_name("m", c, manifest="m") for c in (adam, judged_plan.references[SAME_BLOCK])]
    assert workdirs[0] != workdirs[1]


def test_edited_mixer_file_is_refused(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(_registry, "_registered", {})
    monkeypatch.setattr(_registry, "_by_file", set())
    monkeypatch.chdir(tmp_path)
    example = support.page_block("docs/add_a_mixer.md", "class GatedEma(")
    (tmp_path / "gema.py").write_text(example)
    original = plan_for(tmp_path, "./gema.py:debug")
    assert set(original.code) == {"gema"} and original.judged["code"] == original.code
    runs = Runs(original)
    runs.run(SAME_BLOCK, HIGH)
    runs.write()
    Runs(original)
    named = plan_for(tmp_path, "transformer_pp:debug,model.mixer.name=gema.py:GatedEma")
    assert f"model.mixer.name={tmp_path}/gema.py:GatedEma" in named.text
    (tmp_path / "gema.py").write_text(example + "# other\n")
    changed = plan_for(tmp_path, "./gema.py:debug")
    with pytest.raises(UserError, match="code: gema "):
        Runs(changed)
    without_code = re.sub(r",\s*'code': \{[^}]*\}", "", original.study.read_text())  # as an earlier version
    assert without_code != original.study.read_text()
    original.study.write_text(without_code)
    Runs(changed)


def test_config_file_is_stored_with_absolute_path(trainer, tmp_path, monkeypatch):
    text = "from seqjax import presets\n\n\ndef get_config({}):\n"
    text += "    return presets.get_config({}, name='x', base='mamba2')\n"
    (tmp_path / "mine.py").write_text(text.format("arg='debug'", "arg"))
    monkeypatch.chdir(tmp_path)
    judged_plan = plan_for(tmp_path, "mine.py")
    assert judged_plan.text.startswith(f"{tmp_path / 'mine.py'}:debug,limited,") and judged_plan.model == "mine"
    assert plan_for(tmp_path, "mine.py:debug,model.mixer.expand=4").model == "mine, model.mixer.expand=4"
    (tmp_path / "fixed.py").write_text(text.format("", "'debug'"))
    with pytest.raises(UserError, match=r"get_config\(\) of .*fixed\.py .*argument"):
        plan_for(tmp_path, "fixed.py")


def test_directory_keeps_runs_and_accepts_more_rates(trainer, tmp_path):
    first = Runs(plan_for(tmp_path))
    index = first.run("mamba2", HIGH).index
    first.write()
    second = Runs(plan_for(tmp_path, rates=(2e-3,)))
    assert second.rates == [2e-3, LOW, HIGH] and second.run("mamba2", HIGH).index == index
    assert second.run("mamba2", 2e-3).index == index + 1
    assert second.tried("mamba2") == [HIGH, 2e-3]
    with pytest.raises(UserError, match=r"study\.py .*mamba2:debug.*train\.steps: 20 -> 40"):
        Runs(plan_for(tmp_path, "mamba2:debug,train.steps=40"))


def test_changed_setting_is_refused_by_key(trainer, tmp_path):
    Runs(plan_for(tmp_path)).write()
    for settings, key in (
        ("eval.tokens=512", "eval.tokens"),
        ("optim.b2=0.9", "optim.b2"),
        ("train.steps=40", "steps"),
    ):
        with pytest.raises(UserError, match=key):
            Runs(plan_for(tmp_path, f"mamba2:debug,{settings}"))
    with pytest.raises(UserError, match="model: mamba2 -> gla"):
        Runs(plan_for(tmp_path, "gla:debug"))


def test_judgement_keeps_its_recorded_text(trainer, tmp_path, monkeypatch):
    """The built-in text depends on the installed packages."""
    Runs(plan_for(tmp_path)).write()

    def opened(*args, recorded, **kwargs):
        return SimpleNamespace(**vars(trainer.corpus) | {"manifest_hash": recorded or "new"})

    monkeypatch.setattr(plan, "open_corpus", opened)
    assert Runs(plan_for(tmp_path)).plan.manifest == "m"
    assert plan.make_plan("mamba2:debug", out=tmp_path / "other", cache=tmp_path / "cache").manifest == "new"
    trainer.corpus.manifest_hash = "new"
    monkeypatch.setattr(plan, "open_corpus", lambda *args, **kwargs: trainer.corpus)
    with pytest.raises(UserError, match="manifest m -> new"):
        Runs(plan_for(tmp_path))


def test_judgement_of_earlier_version_resumes(trainer, tmp_path):
    """Earlier versions wrote a settings hash, and reference configs as text."""
    judged_plan = plan_for(tmp_path)
    runs = Runs(judged_plan)
    index, reference = runs.run("mamba2", HIGH).index, runs.run(SAME_BLOCK, HIGH)
    runs.write()
    text = judged_plan.entry("mamba2", HIGH, seed=0)["config"].removeprefix("mamba2:debug")
    text = f"transformer_pp:debug{text},model.mixer.qk_norm=True,model.mixer.conv=True"
    study = judged_plan.study.read_text()
    assert study.count(repr(to_dict(reference.config))) == 1
    judged_plan.study.write_text(study.replace(repr(to_dict(reference.config)), repr(text)))
    values = without_added(to_dict(judged_plan.config))
    settings = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
    text, judged = (
        judged_plan.study.read_text(),
        {"config": judged_plan.text, "settings": settings, "manifest": judged_plan.manifest},
    )
    start, end = text.index("JUDGED = "), text.index("RATES = ")
    judged_plan.study.write_text(f"{text[:start]}JUDGED = {judged!r}\n{text[end:]}")
    again = Runs(plan_for(tmp_path))
    assert again.run("mamba2", HIGH).index == index
    assert again.run(SAME_BLOCK, HIGH).config == reference.config
    with pytest.raises(UserError, match=r"eval\.tokens"):
        Runs(plan_for(tmp_path, "mamba2:debug,eval.tokens=512"))


@pytest.mark.parametrize("model", ["mamba2", SAME_BLOCK])
def test_dropped_run_keeps_its_finished_ends(trainer, tmp_path, model):
    runs = Runs(plan_for(tmp_path))
    run = runs.run(model, LOW)
    trainer.write(run, may_stop=lambda run: len(run.lacking) == 2)
    assert run.ends == [10, 13, 16, 20] and not run.complete
    runs.drop(run)
    runs.write()
    again = Runs(plan_for(tmp_path)).run(model, LOW)
    assert again.ends == [10, 13] and again.complete and again.index == run.index
