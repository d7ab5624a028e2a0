"""A judgement's sentence, from known rows."""

import dataclasses
from pathlib import Path

import pytest

from seqjax.study.gaps import Row
from seqjax.study.gaps.statistics import Estimate
from seqjax.study.gaps.tokens import Difference
from seqjax.study.gaps.verdicts import COSTS, GAINS, UNDECIDED, Verdict, no_cost
from seqjax.study.judge import page, plan
from seqjax.study.judge.costs import Cost
from seqjax.study.judge.plan import PUBLISHED, SAME_BLOCK, Plan

CPU = frozenset({"cpu"})
ROW = Row("ema", SAME_BLOCK, 3, 3, (1.0, 2.0), "", "", {}, parameters=100, reference_parameters=100)


def example_plan(size="debug"):
    return Plan(
        model="ema",
        text="ema.py:debug",
        config=plan.read(f"mamba2:{size}"),
        references={name: plan.read(f"transformer_pp:{size},{settings}") for name, settings in plan.REFERENCES.items()},
        domains=("arxiv",),
        against=("c4",),
        manifest="m",
        rates=(1e-3,),
        seeds=3,
        out=Path("out"),
        cache=Path("cache"),
    )


def costs(speed=120.0, reference_speed=100.0, **changes):
    cost = Cost(reference_speed, None, {}, CPU, 1)
    return {"ema": dataclasses.replace(cost, tokens_per_s=speed, **changes), SAME_BLOCK: cost, PUBLISHED: cost}


def sentence_for(word=COSTS, gap=0.31, needs="", model_costs=None, tried=(), inside=None, **changes):
    if gap is not None:
        changes["gaps"] = {"OOD mean": Estimate(gap, 0.01, 50.0)}
    if inside is not None:
        changes["at_equal_tokens"] = Difference(Estimate(inside, 0.01), Estimate(0.0, 0.01))
    row = dataclasses.replace(ROW, verdict=Verdict(word, needs), **changes)
    return page.sentence(example_plan(), row, model_costs or costs(), tried=tried)


def test_sentence_has_verdict_and_gap():
    assert "ema costs " in sentence_for() and "+0.310 ± 0.020" in sentence_for()
    assert "ema gains " in sentence_for(GAINS, -0.12) and "-0.120 ± 0.020" in sentence_for(GAINS, -0.12)
    assert "ema has no cost above 0.05 " in sentence_for(no_cost(0.05), -0.006)
    assert "undecided (needs: 2 more seeds)" in sentence_for(UNDECIDED, 0.03, "2 more seeds")
    text = sentence_for(UNDECIDED, None, "ends from 50%", why="no end is within reach of the reference")
    assert "ends from 50%" in text and "no end is within reach of the reference" in text
    assert "undecided" in page.sentence(example_plan(), None, costs())


def test_sentence_has_marks():
    assert "one seed" in sentence_for(seeds=1) and "one seed" not in sentence_for()
    trend = Estimate(-0.1, 0.01, 50.0)
    assert "shrinks with tokens" in sentence_for(per_doubling=trend) and "grows with tokens" in sentence_for(
        GAINS, -0.3, per_doubling=trend
    )
    marked = {"edge": "highest", "reference_edge": "highest", "next_rates": {"model": 4.0, "reference": 8.0}}
    assert "provisional" in sentence_for(**marked) and "0.004 of the mixer, 0.008 of attention" in sentence_for(
        **marked
    )
    assert "0.004" not in sentence_for(**marked, tried=(0.004,)) and "0.008" in sentence_for(**marked, tried=(0.004,))
    assert "provisional" not in sentence_for(**marked, tried=(0.004, 0.008))  # these rates were tried and diverged


@pytest.mark.parametrize(("parameters", "text"), [(113, "13% more"), (90, "10% fewer"), (102, ""), (98, "")])
def test_sentence_has_parameter_difference(parameters, text):
    sentence = sentence_for(parameters=parameters)
    assert text in sentence and ("parameters" in sentence) == bool(text)


def test_sentence_has_in_domain_difference():
    assert "0.26 higher" in sentence_for(inside=0.26) and "0.06 lower" in sentence_for(inside=-0.06)
    assert "equal tokens" not in sentence_for(inside=0.04)


def test_speeds_compare_only_on_one_device():
    assert sentence_for(model_costs=costs(speed=62.0)).endswith(" 0.62 times as fast.")
    for model_costs in (costs(devices=frozenset({"NVIDIA H200"})), costs(speed=None)):
        assert "as fast" not in sentence_for(model_costs=model_costs)


def test_smoke_test_note_only_at_demo_and_debug():
    assert page.head(example_plan("debug"))[0].startswith("This is a smoke test at the size debug")
    assert page.head(example_plan("demo"))[0].startswith("This is a smoke test at the size demo")
    assert page.head(example_plan("110m")) == []
