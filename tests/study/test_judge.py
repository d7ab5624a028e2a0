"""What a judgement trains, in which order, and how it goes on; the trainer writes runs whose losses are known."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import seqjax
from seqjax.config import from_config_dict, presets
from seqjax.study import end_points, figures, forest, judge, judge_page, judge_plan, runner
from seqjax.study.judge_plan import MODEL_ENDS, PUBLISHED, REFERENCE_ENDS, SAME_BLOCK
from seqjax.study.studies import load_study
from seqjax.utils import UserError
from tests.study.synthetic import write_trunk

DOMAINS = ("commoncrawl", "c4", "arxiv", "github")
RATES = SimpleNamespace(low=4e-3, middle=8e-3, high=16e-3)


def study_text(path):
    return Path(path).read_text()


class Trainer:
    """Writes the runs that it is asked for: a loss in domain that falls to `last`, and a gap out of domain."""

    def __init__(self):
        self.best = RATES.middle  # of the mixer
        self.mixer, self.reference, self.gap, self.noise = 3.0, 3.05, 0.3, 0.004
        self.per_octave = 0.03
        self.diverging: set[float] = set()
        self.broken: set[str] = set()
        self.stop_after = math.inf
        self.trained: list[str] = []

    def last(self, run):
        lr = run.config.optim.lr
        if run.model in (PUBLISHED, SAME_BLOCK):
            return self.reference + self.noise * run.seed
        return self.mixer + self.per_octave * abs(math.log2(lr / self.best)) + self.noise * run.seed**2

    def train_all(self, study, runs, *, jobs, may_stop, later):
        assert all(repr(run.label) in study_text(study) for run in runs)
        failed = []
        for run in runs:
            if may_stop(run):
                continue
            if len(self.trained) >= self.stop_after:
                raise KeyboardInterrupt
            self.trained.append(run.label)
            if run.label in self.broken or run.config.optim.lr in self.diverging:
                run.workdir.mkdir(parents=True, exist_ok=True)
                if run.label not in self.broken:
                    (run.workdir / "not_finite_step7.npz").touch()
                failed.append(run)
                continue
            gap = 0.0 if run.model in (PUBLISHED, SAME_BLOCK) else self.gap
            for share in run.config.train.ends:
                loss = self.last(run) + 1.0 * (1 - share)
                steps = run.config.train.steps
                write_trunk(run.workdir, {share: loss}, lambda name, x, gap=gap: x + 1 + gap, steps=steps, noise=0)
                if may_stop(run):
                    break
        return failed


@pytest.fixture
def trainer(monkeypatch):
    """Without the study's pictures, of which the page says nothing; test_figures.py looks at them."""
    made = Trainer()
    for module, name in ((figures, "against_loss_in_domain"), (forest, "gaps"), (end_points, "by_rate")):
        monkeypatch.setattr(module, name, lambda path, records: path.touch())
    corpus = SimpleNamespace(eval_domains=DOMAINS, in_domain=DOMAINS[:2], manifest_hash="m")
    monkeypatch.setattr(judge_plan, "open_corpus", lambda *args, **kwargs: corpus)
    monkeypatch.setattr(runner, "train_all", made.train_all)
    monkeypatch.setattr(judge, "require_sound", lambda plan: None)
    made.corpus = corpus
    return made


@pytest.fixture
def judged(trainer, tmp_path):
    """Judge Mamba-2, with other options than the usual ones."""

    def run(config="mamba2:debug", **options):
        return judge.judge(config, **({"out": tmp_path / "out", "references": tmp_path / "cache"} | options))

    return run


def labels(rate, *seeds):
    return [f"mamba2, rate {rate:g}, seed {seed}" for seed in seeds]


def plan_of(tmp_path, config="mamba2:debug", **options):
    return judge_plan.make_plan(config, out=tmp_path / "out", cache=tmp_path / "cache", **options)


# ----------------------------------------------------------------------------------------------------------------- plan
def test_a_dry_run_lists_all_runs_and_trains_nothing(trainer, tmp_path, capsys):
    options = [f"--out={tmp_path / 'out'}", f"--references={tmp_path / 'cache'}"]
    judge.main(["--config=mamba2:debug", "--dry_run", *options])
    said = capsys.readouterr().out
    assert "11 of 11 runs left" in said and "mamba2, best rate, seed 2" in said
    assert said.index("rate 0.008") < said.index("rate 0.004") < said.index("conv, seed 0")
    assert not trainer.trained and not (tmp_path / "out").exists()


def test_references_have_the_settings_of_the_mixers_config_and_a_model_of_their_own(trainer, tmp_path):
    changes = "train.batch_size=8,eval.tokens=512,optim.b2=0.9,optim.clip_norm=None,model.dim=32,model.n_layers=1"
    plan = plan_of(tmp_path, f"mamba2:debug,{changes},data.eval_domains=('prose','python')")
    run = plan.of_reference(SAME_BLOCK, seed=1)[1]
    config = judge_plan.read(run["config"])
    assert (config.train.batch_size, config.eval.tokens, config.optim.b2, config.optim.clip_norm) == (8, 512, 0.9, None)
    assert config.data.eval_domains == ("prose", "python")
    assert (config.model.dim, config.model.n_layers) == (64, 2)
    assert config.model.mixer.qk_norm and config.model.mixer.conv
    assert not judge_plan.read(plan.references[PUBLISHED]).model.mixer.conv
    assert config.optim.lr == plan.reference_rates[SAME_BLOCK] and config.train.ends == REFERENCE_ENDS
    assert config.train.seed == config.data.seed == 1
    assert (config.eval.every, config.checkpoint.ends, config.log.sample_tokens) == (0, "none", 0)
    ours, theirs = plan.config, config
    assert dataclasses.replace(ours.data, seed=1) == theirs.data and ours.eval == theirs.eval


def test_each_reference_has_its_own_rate(trainer, tmp_path):
    def rates(**options):
        plan = plan_of(tmp_path, "mamba2:110m", **options)
        return {
            model: judge_plan.read(plan.of_reference(model, seed=0)[1]["config"]).optim.lr for model in plan.references
        }

    assert rates() == {SAME_BLOCK: 2e-3, PUBLISHED: 1e-3}
    assert rates(reference_rate=5e-4) == {SAME_BLOCK: 5e-4, PUBLISHED: 5e-4}


def test_the_demo_is_shorter_unless_the_config_says_how_long(trainer, tmp_path):
    scale = judge_plan.SCALES["demo"]
    plan = plan_of(tmp_path, "mamba2")
    assert (plan.config.train.steps, plan.config.eval.tokens) == (scale.steps, scale.eval_tokens)
    assert judge_plan.read(plan.references[PUBLISHED]).train.steps == scale.steps
    assert plan_of(tmp_path, "mamba2:demo,train.steps=400").config.train.steps == 400


def test_the_runs_of_references_are_named_by_data_and_settings_alone(trainer, tmp_path):
    def names(config, **options):
        plan = plan_of(tmp_path, config, **options)
        return {plan.of_reference(model, seed=0)[1]["workdir"] for model in plan.references}

    usual = names("mamba2:debug")
    assert len(usual) == 2
    assert names("rwkv7:debug,model.dim=32") == usual
    for other in ("mamba2:debug,train.steps=40", "mamba2:debug,eval.tokens=512", "mamba2:debug,optim.b1=0.8"):
        assert not names(other) & usual, other
    assert not names("mamba2:debug", rates=(1e-3,), reference_rate=1e-3) & usual
    trainer.corpus.manifest_hash = "other"
    assert not names("mamba2:debug") & usual


def test_a_config_file_is_named_by_its_whole_path(trainer, tmp_path, monkeypatch):
    text = "from seqjax import presets\n\n\ndef get_config({}):\n"
    text += "    return presets.get_config({}, name='x', base='mamba2')\n"
    (tmp_path / "mine.py").write_text(text.format("arg='debug'", "arg"))
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, "mine.py")
    assert plan.text.startswith(f"{tmp_path / 'mine.py'}:debug,limited,") and plan.model == "mine"
    assert plan_of(tmp_path, "mine.py:debug,model.mixer.expand=4").model == "mine, model.mixer.expand=4"
    (tmp_path / "fixed.py").write_text(text.format("", "'debug'"))
    with pytest.raises(UserError, match=r"get_config\(\) of .*fixed\.py takes no argument; let it take one"):
        plan_of(tmp_path, "fixed.py")


# --------------------------------------------------------------------------------------------------------------- phases
def test_rates_then_references_then_seeds(judged, trainer, tmp_path):
    found = judged()
    assert trainer.trained[:3] == [*labels(RATES.middle, 0), *labels(RATES.low, 0), *labels(RATES.high, 0)]
    assert {label.rpartition(",")[0] for label in trainer.trained[3:9]} == {PUBLISHED, SAME_BLOCK}
    assert trainer.trained[9:] == labels(RATES.middle, 1, 2)
    assert found.verdicts[SAME_BLOCK] == "costs more than 0.05" and found.gaps[SAME_BLOCK] == pytest.approx(
        0.3, abs=0.01
    )
    assert found.sentence.startswith("In this smoke test, mamba2 costs 0.30 ± 0.0")
    assert found.sentence.endswith("against attention with the same block; at 128 tokens it trains 1.0 times as fast.")
    runs = load_study(tmp_path / "out" / "study.py").runs
    assert all(run.complete for run in runs) and len(runs) == 11
    assert runs[-1].config.train.ends == MODEL_ENDS  # it is below the references
    assert f"**{found.sentence}**\n\n{found.foretold}\n" in (tmp_path / "out" / "judge.md").read_text()
    assert found.foretold == judge_page.foretold()


@pytest.mark.slow
def test_a_second_mixer_costs_its_own_runs_alone(judged, trainer, tmp_path):
    judged()
    trainer.trained.clear()
    judged("deltanet:debug", out=tmp_path / "other")
    assert len(trainer.trained) == 5 and all(label.startswith("deltanet") for label in trainer.trained)


@pytest.mark.slow
def test_more_seeds_are_appended(judged, trainer, tmp_path):
    judged(seeds=1)
    before = [run.label for run in load_study(tmp_path / "out" / "study.py").runs]
    assert judged(seeds=1).verdicts[SAME_BLOCK] == "cannot tell (one seed)"
    assert len(trainer.trained) == 5
    assert judged(seeds=3).verdicts[SAME_BLOCK] == "costs more than 0.05"
    after = [run.label for run in load_study(tmp_path / "out" / "study.py").runs]
    assert after[: len(before)] == before and len(after) == 11


def test_a_rate_far_behind_is_dropped_at_its_first_end(judged, trainer, tmp_path):
    trainer.per_octave = 0.2
    found = judged(seeds=1)
    of_rate = {run.label: run for run in load_study(tmp_path / "out" / "study.py").runs}
    for rate in (RATES.low, RATES.high):
        run = of_rate[labels(rate, 0)[0]]
        assert len(run.lacking) == 2
        assert any(run.label in text and "0.20 nats in domain behind" in text for text in found.warnings)
    assert not any("one tried" in text for text in found.warnings)  # the dropped ones were
    trainer.trained.clear()
    assert judged(seeds=1).sentence == found.sentence and not trainer.trained


@pytest.mark.parametrize(
    ("best", "tried"), [(32e-3, (32e-3, 64e-3)), pytest.param(1e-3, (2e-3, 1e-3), marks=pytest.mark.slow)]
)
def test_the_grid_is_extended_at_its_edge_at_most_twice(judged, trainer, best, tried):
    trainer.best = best
    found = judged(seeds=2)
    assert trainer.trained[3:5] == [label for rate in tried for label in labels(rate, 0)]
    assert trainer.trained[-1:] == labels(best, 1)
    assert any("the lowest one tried" in text for text in found.warnings) == (best == 1e-3)


def test_seeds_of_a_clearly_worse_mixer_have_one_end(judged, trainer, tmp_path):
    trainer.mixer = 3.4
    found = judged()
    runs = load_study(tmp_path / "out" / "study.py").runs
    assert [run.config.train.ends for run in runs[-2:]] == [(1.0,), (1.0,)]
    assert found.verdicts[SAME_BLOCK] == "costs more than 0.05"


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stop_after", "seeds"), [(4, 1), *(pytest.param(*case, marks=SLOW) for case in ((1, 1), (2, 2), (7, 2)))]
)
def test_a_resumed_judgement_decides_the_same(judged, trainer, tmp_path, stop_after, seeds):
    trainer.per_octave = 0.2
    whole = judged(out=tmp_path / "whole", references=tmp_path / "whole" / "cache", seeds=seeds)
    order = list(trainer.trained)
    trainer.trained.clear()
    trainer.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):
        judged(seeds=seeds)
    trainer.stop_after = math.inf
    found = judged(seeds=seeds)
    assert trainer.trained == order
    assert dataclasses.replace(found, out=whole.out) == whole


# ------------------------------------------------------------------------------------------------------------ bad input
def test_a_rate_at_which_the_loss_is_not_finite_is_dropped(judged, trainer):
    trainer.diverging = {RATES.high}
    found = judged(seeds=1)
    assert any(f"{labels(RATES.high, 0)[0]}: the loss is not finite" in text for text in found.warnings)
    assert found.gaps[SAME_BLOCK] == pytest.approx(0.3, abs=0.01)


def test_a_mixer_that_diverges_at_every_rate_can_be_told_its_speed_alone(judged, trainer, tmp_path):
    trainer.diverging = {RATES.low, RATES.middle, RATES.high}
    found = judged()
    assert "mamba2 diverged at every learning rate tried (0.008, 0.004, 0.016)" in found.sentence
    assert found.gaps[SAME_BLOCK] is None and len(trainer.trained) == 3
    assert found.sentence in (tmp_path / "out" / "judge.md").read_text()
    trainer.trained.clear()
    assert judged().sentence == found.sentence and not trainer.trained


def test_a_run_that_fails_otherwise_stops_the_judgement_and_is_tried_again(judged, trainer):
    trainer.broken = {*labels(RATES.low, 0)}
    with pytest.raises(UserError, match=r"rate 0\.004, seed 0 failed; .*says why"):
        judged(seeds=1)
    trainer.broken = set()
    assert judged(seeds=1).gaps[SAME_BLOCK] == pytest.approx(0.3, abs=0.01)


def test_bad_input_is_refused_in_a_sentence(judged, trainer, tmp_path):
    judged(seeds=1)
    with pytest.raises(UserError, match=r"out: its study\.py judges mamba2:debug.* than rwkv7:debug"):
        judged("rwkv7:debug")
    with pytest.raises(UserError, match="judges mamba2:debug"):
        judged("mamba2:debug,train.steps=40")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "study.py").write_text("def get_study(): ...\n")
    with pytest.raises(UserError, match="was not written by seqjax judge"):
        judged(out=tmp_path / "else")
    with pytest.raises(UserError, match="--jobs must be at least 1, not 0"):
        judged(jobs=0)
    with pytest.raises(UserError, match="--seeds must be 1 to"):
        judged(seeds=0)
    with pytest.raises(UserError, match=r"no learning rates are recorded for the size 1b3; .*--reference_rate"):
        judged("mamba2:1b3")
    with pytest.raises(UserError, match="--rates=fast: give learning rates"):
        judge.main(["--config=mamba2:debug", "--rates=fast"])
    with pytest.raises(UserError, match="learning rates above 0, each named once"):
        judged(rates=(1e-3, 1e-3))
    with pytest.raises(UserError, match="--out=s3://bucket/x"):
        judged(out="s3://bucket/x")
    trainer.corpus.in_domain = DOMAINS
    with pytest.raises(UserError, match="domains that it is not, as in the regime limited"):
        judged(out=tmp_path / "new")
    trainer.corpus.in_domain = trainer.corpus.eval_domains = ("c4",)
    with pytest.raises(UserError, match="is evaluated on c4; a judgement needs"):
        judged(out=tmp_path / "new")


def test_another_number_of_parameters_is_said(judged):
    found = judged("mamba2:debug,model.n_layers=12", seeds=1)
    assert any("times the parameters of attention" in text for text in found.warnings)


LEAKY = """
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seqjax.mixers import base
from seqjax.nn import Linear


class Cache(NamedTuple):
    h: jax.Array


class Leaky(base.Mixer):
    def __init__(self, dim, *, layer=base.Layer(), rngs):
        self.dim = dim
        self.out = Linear(dim, dim, axes=("mlp", "embed"), rngs=rngs)

    def __call__(self, x_BTD):
        return self.out(x_BTD + x_BTD.mean(1, keepdims=True))

    def init_cache(self, batch, max_len, dtype):
        return Cache(jnp.zeros((batch, self.dim), jnp.float32))

    def step(self, x_BD, cache):
        return self.out(x_BD), cache
"""
CONFIG = """
from seqjax import presets


def get_config(arg=""):
    return presets.get_config(arg, name="mine", mixer={"name": NAME})
"""


@pytest.mark.slow
def test_a_mixer_that_sees_the_future_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    (tmp_path / "leaky.py").write_text(LEAKY)
    (tmp_path / "leaking.py").write_text(LEAKY)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "leaky.py").write_text(LEAKY)
    (tmp_path / "mine.py").write_text(CONFIG.replace("NAME", "'pack.leaky'"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        UserError, match=r"passes seqjax\.testing\.check_mixer: Leaky fails .* causality: changing token"
    ):
        judge.judge("mine.py:debug", out=tmp_path / "out", references=tmp_path / "cache")
    assert not (tmp_path / "out" / "study.py").exists()
    sys.modules.pop("pack.leaky", None)


# ------------------------------------------------------------------------------------------------------------- for real
@pytest.mark.slow
def test_a_tiny_mixer_is_judged_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "require_sound", lambda plan: None)  # the test before this one runs it
    small = "train.steps=15,train.batch_size=8,train.seq_len=32,eval.tokens=256,optim.warmup_steps=2,"
    small += "model.dim=16,model.n_layers=1"
    found = seqjax.judge(
        f"deltanet:debug,{small}", out=tmp_path / "out", references=tmp_path / "cache", seeds=2, rates=(4e-3, 8e-3),
        reference_rate=8e-3,
    )  # fmt: skip
    assert found.verdicts[SAME_BLOCK].startswith("cannot tell")
    assert (tmp_path / "out" / judge_page.FILE).read_text().startswith("# deltanet")
    assert (tmp_path / "out" / "gaps.png").read_bytes().startswith(b"\x89PNG")
    assert found.tokens_per_s[SAME_BLOCK] and found.state_bytes[found.model]
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert len(names) == 4 and all("transformer" in name for name in names)
    assert from_config_dict(presets.read_config("deltanet:debug")).size == "debug"
    assert json.loads((tmp_path / "out" / "runs" / "04" / judge_page.JOBS).read_text()) == {"jobs": 1}
