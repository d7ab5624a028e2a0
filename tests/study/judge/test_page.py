"""The sentence of a judgement and its costs, from rows and runs that are known."""

import dataclasses
import json
from pathlib import Path

import pytest

from seqjax.study.gaps import Row
from seqjax.study.gaps.statistics import Estimate
from seqjax.study.gaps.tokens import Difference
from seqjax.study.gaps.verdicts import COSTS, GAINS, UNDECIDED, Verdict, no_cost
from seqjax.study.judge import page, plan
from seqjax.study.judge.page import Cost
from seqjax.study.judge.plan import PUBLISHED, SAME_BLOCK, Plan
from seqjax.study.runs.runner import Run

CPU = frozenset({"cpu"})
ROW = Row("ema", SAME_BLOCK, 3, 3, (1.0, 2.0), "", "", {}, parameters=100, reference_parameters=100)


def plan_of(size="debug"):
    return Plan(
        model="ema",
        text="ema.py:debug",
        config=plan.read(f"mamba2:{size}"),
        references={SAME_BLOCK: "", PUBLISHED: ""},
        domains=("arxiv",),
        against=("c4",),
        manifest="m",
        rates=(1e-3,),
        seeds=3,
        out=Path("out"),
        cache=Path("cache"),
    )


def costs(ours=120.0, theirs=100.0, **changes):
    cost = Cost(theirs, None, {}, CPU, 1)
    return {"ema": dataclasses.replace(cost, tokens_per_s=ours, **changes), SAME_BLOCK: cost, PUBLISHED: cost}


def said(word=COSTS, gap=0.31, needs="", found=None, tried=(), inside=None, **changes):
    if gap is not None:
        changes["gaps"] = {"OOD mean": Estimate(gap, 0.01, 50.0)}
    if inside is not None:
        changes["at_equal_tokens"] = Difference(Estimate(inside, 0.01), Estimate(0.0, 0.01))
    row = dataclasses.replace(ROW, verdict=Verdict(word, needs), **changes)
    return page.sentence(plan_of(), row, found or costs(), tried=tried)


def test_the_sentence_has_the_verdict_and_the_gap():
    assert "ema costs " in said() and "+0.310 ± 0.020" in said()
    assert "ema gains " in said(GAINS, -0.12) and "-0.120 ± 0.020" in said(GAINS, -0.12)
    assert "ema has no cost above 0.05 " in said(no_cost(0.05), -0.006)
    assert "undecided (needs: 2 more seeds)" in said(UNDECIDED, 0.03, "2 more seeds")
    text = said(UNDECIDED, None, "ends from 50%", why="no end is within reach of the reference")
    assert "ends from 50%" in text and "no end is within reach of the reference" in text
    assert "undecided" in page.sentence(plan_of(), None, costs())


def test_the_sentence_has_the_marks():
    assert "one seed" in said(seeds=1) and "one seed" not in said()
    trend = Estimate(-0.1, 0.01, 50.0)
    assert "shrinks with tokens" in said(per_doubling=trend) and "grows with tokens" in said(
        GAINS, -0.3, per_doubling=trend
    )
    marked = {"edge": "highest", "reference_edge": "highest", "next_rates": {"model": 4.0, "reference": 8.0}}
    assert "provisional" in said(**marked) and "0.004 of the mixer, 0.008 of attention" in said(**marked)
    assert "0.004" not in said(**marked, tried=(0.004,)) and "0.008" in said(**marked, tried=(0.004,))
    assert "provisional" not in said(**marked, tried=(0.004, 0.008))  # their loss was not finite


@pytest.mark.parametrize(("parameters", "text"), [(113, "13% more"), (90, "10% fewer"), (102, ""), (98, "")])
def test_a_difference_in_parameters_is_marked(parameters, text):
    found = said(parameters=parameters)
    assert text in found and ("parameters" in found) == bool(text)


def test_the_sentence_says_where_a_mixer_learns_less_from_the_same_tokens():
    assert "0.26 higher" in said(inside=0.26) and "0.06 lower" in said(inside=-0.06)
    assert "equal tokens" not in said(inside=0.04)


def test_speeds_are_compared_on_one_device_alone():
    assert said(found=costs(ours=62.0)).endswith("it trains 0.62 times as fast.")
    for found in (costs(devices=frozenset({"NVIDIA H200"})), costs(ours=None)):
        assert "as fast" not in said(found=found)
    two = costs(devices=frozenset({"cpu", "NVIDIA H200"}))
    assert any("different devices" in text for text in page._of_costs(two))
    assert any("shared one CPU (ema)" in text for text in page._of_costs(costs(shared=2)))
    assert any("The speed of ema was not measured" in text for text in page._of_costs(costs(ours=None)))


def test_a_smoke_test_is_named_first_at_demo_and_debug_alone():
    assert page.head(plan_of("debug"))[0].startswith("This is a smoke test at the size debug")
    assert page.head(plan_of("demo"))[0].startswith("This is a smoke test at the size demo")
    assert page.head(plan_of("110m")) == []


def workdir(path, speeds, peak):
    path.mkdir()
    rows = [{"step": n, "tokens_per_s": speed, "device_peak_gib": peak} for n, speed in enumerate(speeds)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (path / "run.json").write_text('{"device": "NVIDIA H200"}')
    return path


def test_the_cost_of_runs_is_the_median_of_their_rows_and_the_highest_peak(tmp_path):
    config = plan.read("mamba2:debug")
    runs = []
    for i, (speeds, peak) in enumerate([((1.0, 10.0, 12.0), 3.0), ((11.0, 13.0), 4.0)]):
        runs.append(Run(i, f"{i}", workdir(tmp_path / f"{i}", speeds, peak), None, model="ema"))
    page.note_jobs(runs[0], jobs=2)
    page.note_jobs(runs[0], jobs=1)
    found = page.cost(config, runs)
    assert dataclasses.replace(found, state_bytes={}) == Cost(11.0, 4.0, {}, frozenset({"NVIDIA H200"}), 2)
    assert found.state_bytes == page.state_bytes(config, on_cpu=False)
    nothing = page.cost(config, [])
    assert nothing == Cost(None, None, page.state_bytes(config, on_cpu=True), frozenset(), 1)


def test_speeds_of_one_device_make_a_table(tmp_path):
    made = dataclasses.replace(
        plan_of(), references={name: f"transformer_pp:debug,{x}" for name, x in plan.REFERENCES.items()}
    )
    names = (made.model, SAME_BLOCK)
    runs = [Run(i, name, workdir(tmp_path / f"{i}", (i + 1.0,), 1.0), None, model=name) for i, name in enumerate(names)]
    (table,) = page.speeds(made, runs).values()
    assert table == {"card": "NVIDIA H200", "length": 128, "tokens_per_s": {"ema": 1.0, SAME_BLOCK: 2.0}}
    page.note_jobs(runs[0], jobs=2)
    assert page.speeds(made, runs) == {}


def test_the_state_of_attention_grows_and_that_of_a_recurrent_mixer_does_not():
    states = {name: page.state_bytes(plan.read(f"{name}:debug"), on_cpu=True) for name in ("transformer_pp", "mamba2")}
    assert states["transformer_pp"][128] - states["transformer_pp"][64] == 64 * 2 * 2 * 64 * 4  # K and V of two layers
    assert states["mamba2"][128] == states["mamba2"][64]
