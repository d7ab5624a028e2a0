"""Judgements with a fake trainer: runs, order, resuming, and verdicts."""

import dataclasses
import json
import math
import sys

import pytest

import seqjax
from seqjax.errors import UserError
from seqjax.study import gaps
from seqjax.study.gaps import rows as gap_rows
from seqjax.study.gaps.verdicts import COSTS, GAINS, UNDECIDED, no_cost
from seqjax.study.judge import __main__ as command
from seqjax.study.judge import costs, page, plan, run
from seqjax.study.judge.plan import PUBLISHED, SAME_BLOCK
from seqjax.study.judge.run import beyond, common_rate
from seqjax.study.runs import files
from seqjax.study.runs.studies import load_study
from seqjax.training import dry_run
from tests.study.judge.conftest import DOMAINS, HIGH, LOW, labels

SLOW = pytest.mark.slow


# ------------------------------------------------------------------------------------------------------- learning rates
def test_grid_extends_past_a_best_rate_at_its_edge():
    assert beyond([1e-3, 2e-3], {1e-3: 3.0, 2e-3: 2.9}) == 4e-3
    assert beyond([1e-3, 2e-3], {1e-3: 2.8, 2e-3: 2.9}) == 5e-4
    assert beyond([1e-3, 2e-3, 4e-3], {1e-3: 3.0, 2e-3: 2.9}) is None  # 4e-3 was dropped
    assert beyond([1e-3], {}) is None


def losses_by_rate(*losses):
    return dict(zip((1e-3, 2e-3, 4e-3), losses, strict=False))


@pytest.mark.parametrize(
    ("mixer", "same_block", "published", "with_seeds", "expected"),
    [
        ((3.02, 3.0, 3.1), (2.92, 2.9, 3.0), (2.8, 2.82, 3.0), (), 2e-3),
        ((3.0, 3.02, 3.1), (2.92, 2.9, 3.0), (2.8, 2.9, 3.0), (), 1e-3),  # mixer and attention tie
        ((3.02, 3.0, 3.1), (2.92, 2.9, 3.0), (2.8, 2.82, 3.0), (1e-3,), 1e-3),  # the reference already has seeds there
        ((3.04, 3.0, 3.1), (2.92, 2.9, 3.0), (2.8, 2.82, 3.0), (1e-3,), 2e-3),  # 1e-3 is not near-best for the mixer
        ((3.0, 3.1, 3.2), (3.1, 3.0, 3.1), (3.0, 3.1), (), None),
    ],
)
def test_common_rate_of_further_seeds(mixer, same_block, published, with_seeds, expected):
    losses = {
        "ema": losses_by_rate(*mixer),
        SAME_BLOCK: losses_by_rate(*same_block),
        PUBLISHED: losses_by_rate(*published),
    }
    assert common_rate(losses, "ema", with_seeds=with_seeds) == expected


# --------------------------------------------------------------------------------------------------------------- phases
def test_dry_run_lists_all_runs_and_trains_nothing(trainer, tmp_path, capsys):
    options = [f"--out={tmp_path / 'out'}", f"--references={tmp_path / 'cache'}"]
    command.main(["--config=mamba2:debug", "--dry_run", *options])
    output = capsys.readouterr().out
    assert output.startswith("This is a smoke test")
    # Three models, each with three learning rates and two more seeds; a run has 16 trunk and 12 cooldown steps.
    assert "15 of 15" in output and "mamba2, rate 0.008, seed 2" in output
    assert "21.0 times" in output and "7.0 times" in output
    assert not trainer.trained and not (tmp_path / "out").exists()
    assert output.count(dry_run.TIMED) == 15, "a few steps of each model are timed"


def test_dry_run_needs_no_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dry_run, "CPU_FLOPS", 0)
    options = ["--out=out", "--references=cache"]
    data = "data.corpus=blocks,data.path=absent"
    command.main([f"--config=mamba2:debug,{data}", "--dry_run", *options])
    output = capsys.readouterr().out
    assert "NOT READY" in output and "absent" in output and "15 of 15" in output
    domains = "data.train_domains=(news,),data.eval_domains=(news,law)"
    command.main([f"--config=mamba2:debug,{data},{domains}", "--dry_run", *options])
    assert "15 of 15" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match="absent"):
        command.main([f"--config=mamba2:debug,{data}", *options])


def test_same_rates_first_then_seeds_at_common_rate(judged, trainer, tmp_path, capsys):
    judgement = judged()
    assert capsys.readouterr().out.startswith("This is a smoke test")
    extension = 2 * HIGH
    assert trainer.trained[:3] == [*labels(LOW, 0), *labels(HIGH, 0), *labels(extension, 0)]
    grid = [(name, rate) for name in (SAME_BLOCK, PUBLISHED) for rate in (LOW, HIGH, extension)]
    assert set(trainer.trained[3:9]) == {labels(rate, 0, model=name)[0] for name, rate in grid}
    seed_labels = {label for name in ("mamba2", SAME_BLOCK, PUBLISHED) for label in labels(HIGH, 1, 2, model=name)}
    assert set(trainer.trained[9:]) == seed_labels and len(trainer.trained) == 15
    row = judgement.rows[SAME_BLOCK]
    assert row.verdict.word == COSTS and row.gap.value == pytest.approx(0.3, abs=0.01) and not row.provisional
    assert (row.seeds, row.reference_seeds, row.octaves) == (3, 3, 0.0)
    assert judgement.costs["mamba2"].tokens_per_s == 5.0 and judgement.parameters["mamba2"] == row.parameters
    text = (tmp_path / "out" / "judge.md").read_text()
    assert text.startswith("This is a smoke test") and f"**{judgement.sentence}**" in text
    runs = load_study(tmp_path / "out" / "study.py").runs
    assert all(run.complete for run in runs) and len(runs) == 15
    # The directory's files reproduce the row.
    records = files.read(tmp_path / "out")
    assert {row.model: row for row in gaps.compare(records, SAME_BLOCK)}["mamba2"] == row


@pytest.mark.parametrize(
    ("gap", "spread", "word"),
    [(0.3, 0.004, COSTS), (-0.3, 0.004, GAINS), (0.0, 0.004, no_cost(0.05)), (0.04, 0.05, UNDECIDED)],
)
def test_three_seeds_reach_every_verdict(judged, trainer, gap, spread, word):
    trainer.gap, trainer.spread = gap, spread
    row = judged().rows[SAME_BLOCK]
    assert row.verdict.word == word and row.gap.value == pytest.approx(gap, abs=0.01)
    assert bool(row.verdict.needs) == (word == UNDECIDED)


@pytest.mark.parametrize(("gap", "word"), [(-0.2, GAINS), (0.2, COSTS)])
def test_mixer_with_lower_final_loss_is_judged(judged, trainer, gap, word):
    trainer.mixer, trainer.gap = trainer.reference - 0.4, gap  # 0.1 above the reference at 50% of the tokens
    row = judged().rows[SAME_BLOCK]
    assert row.verdict.word == word and row.gap.value == pytest.approx(gap, abs=0.01)
    assert row.at_equal_tokens.inside.value == pytest.approx(-0.4, abs=0.01)


@SLOW
def test_second_mixer_reuses_reference_runs(judged, trainer, tmp_path):
    judged()
    trainer.trained.clear()
    judged("deltanet:debug", out=tmp_path / "other")
    assert len(trainer.trained) == 5 and all(label.startswith("deltanet") for label in trainer.trained)


def test_exchanged_cached_references_are_refused(judged, trainer, tmp_path):
    judged(seeds=1)
    one, other, *_ = sorted((tmp_path / "cache").iterdir())
    one.rename(tmp_path / "cache" / "between")
    other.rename(one)
    (tmp_path / "cache" / "between").rename(other)
    with pytest.raises(UserError, match=r"cache/transformer.* settings: (model|optim)\."):
        judged("deltanet:debug", seeds=1, out=tmp_path / "other")


def test_more_seeds_and_rates_reuse_finished_runs(judged, trainer, tmp_path):
    trainer.best[""] = 32e-3
    judgement = judged(seeds=1)
    first_labels = [run.label for run in load_study(tmp_path / "out" / "study.py").runs]
    assert len(first_labels) == 9 and judgement.rows[SAME_BLOCK].verdict.word == UNDECIDED
    assert judgement.rows[SAME_BLOCK].next_rates["model"] == 32
    assert any("--rates=0.004,0.008,0.016,0.032" in remark for remark in judgement.remarks)
    trainer.trained.clear()
    judgement = judged(seeds=2, rates=(LOW, HIGH, 16e-3, 32e-3))
    assert not set(trainer.trained) & set(first_labels)
    assert judgement.rows[SAME_BLOCK].verdict.word == COSTS and not judgement.rows[SAME_BLOCK].provisional
    all_labels = [run.label for run in load_study(tmp_path / "out" / "study.py").runs]
    assert all_labels[: len(first_labels)] == first_labels and set(all_labels) - set(first_labels) == set(
        trainer.trained
    )
    trainer.trained.clear()
    assert judged(seeds=2).sentence == judgement.sentence and not trainer.trained


def test_much_worse_rate_is_dropped_at_first_end(judged, trainer, tmp_path):
    trainer.per_octave = 0.2
    judgement = judged(seeds=1)
    runs = {run.label: run for run in load_study(tmp_path / "out" / "study.py").runs}
    for model in ("mamba2", PUBLISHED):
        assert runs[labels(2 * HIGH, 0, model=model)[0]].ends == [10]
        assert len(runs[labels(HIGH, 0, model=model)[0]].ends) == 4
    assert not judgement.rows[SAME_BLOCK].provisional  # the dropped rate was tried
    assert sum("after 50% of its tokens" in remark for remark in judgement.remarks) == 1
    trainer.trained.clear()
    assert judged(seeds=1).sentence == judgement.sentence and not trainer.trained


def test_no_further_seeds_without_a_common_rate(judged, trainer):
    trainer.per_octave, trainer.best[SAME_BLOCK] = 0.08, LOW / 2
    judgement = judged()
    assert judgement.rows[SAME_BLOCK].verdict == (UNDECIDED, gap_rows.heights.NO_RATE, None)
    assert not any(label.endswith(("seed 1", "seed 2")) for label in trainer.trained)
    assert any("0.0057" in remark for remark in judgement.remarks)  # geometric mean of both best rates


@pytest.mark.parametrize(
    ("stop_after", "seeds"), [(5, 1), *(pytest.param(*case, marks=SLOW) for case in ((1, 1), (2, 2), (10, 2)))]
)
def test_resumed_judgement_has_the_same_result(judged, trainer, tmp_path, stop_after, seeds):
    trainer.per_octave = 0.2
    uninterrupted = judged(out=tmp_path / "whole", references=tmp_path / "whole" / "cache", seeds=seeds)
    order = list(trainer.trained)
    trainer.trained.clear()
    trainer.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):
        judged(seeds=seeds)
    trainer.stop_after = math.inf
    resumed = judged(seeds=seeds)
    assert trainer.trained == order
    assert dataclasses.replace(resumed, out=uninterrupted.out) == uninterrupted


# ------------------------------------------------------------------------------------------------------- joined studies
MODELS = {
    "Attention": ("transformer_pp:debug,model.mixer.qk_norm=True,model.mixer.conv=True", (LOW, HIGH), 3),
    "GLA": ("gla:debug", (LOW, HIGH), 2),
    "DeltaNet": ("deltanet:debug", (LOW, HIGH), 1),
}


def test_joined_study_supplies_all_references(judged, trainer, lab, tmp_path):
    published = ("transformer_pp:debug,model.mixer.qk_norm=True", (LOW, HIGH), 3)
    trainer.mixer, trainer.gap = trainer.reference, 0.0
    directory = lab(MODELS | {"Published": published})
    trainer.mixer, trainer.gap = 3.0, 0.3
    judgement = judged(runs=[directory])
    assert trainer.trained == [*labels(LOW, 0), *labels(HIGH, 0), *labels(2 * HIGH, 0), *labels(HIGH, 1, 2)]
    row = judgement.rows[SAME_BLOCK]
    assert row.verdict.word == COSTS and row.gap.value == pytest.approx(0.3, abs=0.02) and row.reference_seeds == 3
    assert set(judgement.rows) == {SAME_BLOCK, PUBLISHED}
    # The joined directory is no longer needed.
    directory.rename(tmp_path / "elsewhere")
    records = files.read(tmp_path / "out")
    assert set(records.models) == {"mamba2", SAME_BLOCK, PUBLISHED, "GLA", "DeltaNet"}
    assert {row.model: row for row in gaps.compare(records, SAME_BLOCK)}["mamba2"] == row
    assert records.blocks is not None and records.asks == ("mamba2",)


def test_joined_reference_gets_missing_seeds(judged, trainer, lab):
    trainer.gap, gap = 0.0, trainer.gap
    directory = lab(MODELS)
    trainer.gap = gap
    judgement = judged(runs=directory, seeds=4)
    assert labels(HIGH, 3, model=SAME_BLOCK)[0] in trainer.trained
    assert not {*labels(LOW, 0, model=SAME_BLOCK), *labels(HIGH, 0, 1, 2, model=SAME_BLOCK)} & {*trainer.trained}
    assert set(labels(HIGH, 0, 1, 2, 3, model=PUBLISHED)) < {*trainer.trained}
    assert judgement.rows[SAME_BLOCK].reference_seeds == 4


def test_few_joined_models_are_compared_at_common_rates(judged, trainer, lab):
    trainer.gap, gap = 0.0, trainer.gap
    directory = lab({"Attention": MODELS["Attention"]})
    trainer.gap = gap
    judgement = judged(runs=[directory])
    assert any("1 models with two near-best learning rates" in remark for remark in judgement.remarks)
    reference_labels = [label for label in trainer.trained if label.startswith(f"{SAME_BLOCK}, rate")]
    assert reference_labels == labels(2 * HIGH, 0, model=SAME_BLOCK)  # the joined study supplies its other runs
    assert judgement.rows[SAME_BLOCK].verdict.word == COSTS


# ------------------------------------------------------------------------------------------------------------ bad input
def test_diverged_rate_is_skipped(judged, trainer):
    trainer.diverging = {2 * HIGH}
    judgement = judged(seeds=2)
    assert any(f"{labels(2 * HIGH, 0)[0]}: the loss is not finite" in remark for remark in judgement.remarks)
    assert judgement.rows[SAME_BLOCK].gap.value == pytest.approx(0.3, abs=0.01)
    assert "provisional" not in judgement.sentence  # the extended rate was tried


def test_mixer_diverging_at_every_rate_has_a_page(judged, trainer, tmp_path):
    trainer.diverging = {LOW, HIGH}
    judgement = judged()
    assert "0.004, 0.008" in judgement.sentence and judgement.rows == {} and len(trainer.trained) == 2
    assert judgement.sentence in (tmp_path / "out" / "judge.md").read_text()
    trainer.trained.clear()
    assert judged().sentence == judgement.sentence and not trainer.trained


def test_failed_run_stops_the_judgement_and_is_retried(judged, trainer):
    trainer.broken = {*labels(LOW, 0)}
    with pytest.raises(UserError, match=r"rate 0\.004, seed 0 .*/log\.txt"):
        judged(seeds=1)
    trainer.broken = set()
    assert judged(seeds=1).rows[SAME_BLOCK].gap.value == pytest.approx(0.3, abs=0.01)


def test_bad_input_is_refused(judged, trainer, tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "study.py").write_text("def get_study(): ...\n")
    with pytest.raises(UserError, match=r"study\.py .*seqjax judge"):
        judged(out=tmp_path / "else")
    with pytest.raises(UserError, match=r"--jobs .*0"):
        judged(jobs=0)
    with pytest.raises(UserError, match="--seeds "):
        judged(seeds=0)
    with pytest.raises(UserError, match=r"size 1b3; .*--rates=A,B"):
        judged("mamba2:1b3")
    with pytest.raises(UserError, match="--rates=fast"):
        command.main(["--config=mamba2:debug", "--rates=fast"])
    for rates in ((1e-3, 1e-3), (-1.0,), (math.nan,), (math.inf,)):
        with pytest.raises(UserError, match="--rates "):
            judged(rates=rates)
    with pytest.raises(UserError, match="--out=s3://bucket/x"):
        judged(out="s3://bucket/x")
    with pytest.raises(UserError, match="--runs=s3://bucket/x"):
        judged(runs="s3://bucket/x")
    with pytest.raises(UserError, match=r"nowhere .*runs\.json"):
        judged(runs=tmp_path / "nowhere")
    trainer.corpus.in_domain = DOMAINS
    with pytest.raises(UserError, match=r" commoncrawl, c4, arxiv, github; .*regime limited"):
        judged(out=tmp_path / "new")
    trainer.corpus.in_domain = trainer.corpus.eval_domains = ("c4",)
    with pytest.raises(UserError, match=r"on c4; .*limited"):
        judged(out=tmp_path / "new")
    assert not trainer.trained


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
def test_non_causal_mixer_is_refused_before_training(tmp_path, monkeypatch):
    (tmp_path / "leaky.py").write_text(LEAKY)
    (tmp_path / "leaking.py").write_text(LEAKY)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "leaky.py").write_text(LEAKY)
    (tmp_path / "mine.py").write_text(CONFIG.replace("NAME", "'pack.leaky'"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"Leaky .* causality: "):
        seqjax.judge("mine.py:debug", out=tmp_path / "out", references=tmp_path / "cache")
    assert not (tmp_path / "out" / "study.py").exists()
    sys.modules.pop("pack.leaky", None)


# ------------------------------------------------------------------------------------------------------------- for real
@pytest.mark.slow
def test_tiny_mixer_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "require_sound", lambda plan: None)  # tested above
    small = "train.steps=15,train.batch_size=8,train.seq_len=32,eval.tokens=256,optim.warmup_steps=2,"
    small += "model.dim=16,model.n_layers=1"
    judgement = seqjax.judge(
        f"deltanet:debug,{small}", out=tmp_path / "out", references=tmp_path / "cache", seeds=2, rates=(4e-3, 8e-3)
    )
    assert set(judgement.rows) == {SAME_BLOCK, PUBLISHED}
    assert "# deltanet" in (tmp_path / "out" / page.FILE).read_text()
    assert (tmp_path / "out" / "gaps.png").read_bytes().startswith(b"\x89PNG")
    assert judgement.costs[SAME_BLOCK].tokens_per_s and judgement.costs[judgement.model].state_bytes
    assert all("transformer" in path.name for path in (tmp_path / "cache").iterdir())
    workdir = next(
        run for run in load_study(tmp_path / "out" / "study.py").runs if run.model == judgement.model
    ).workdir
    assert json.loads((workdir / costs.JOBS).read_text()) == {"jobs": 1}
    assert plan.read("deltanet:debug").size == "debug"
