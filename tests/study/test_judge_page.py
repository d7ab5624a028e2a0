"""The sentence of a judgement, its costs and its page, from gaps and rows that are known."""

import dataclasses
import json
from pathlib import Path

import pytest

from seqjax.study import judge_page, judge_plan
from seqjax.study.equal_loss import Measured, Row, Verdict
from seqjax.study.judge_page import Cost
from seqjax.study.judge_plan import PUBLISHED, SAME_BLOCK, Plan
from seqjax.study.runner import Run
from seqjax.utils import UserError

CPU = frozenset({"cpu"})
ROW = Row("ema", (1.0, 1.0), 3, (3.0, 3.0), {"mean, equal": Measured(0.31, 0.015, 50.0)}, None, 1, 0, (1.0, 1.0), None,
          None, None)  # fmt: skip


def plan(size="debug"):
    return Plan(
        model="ema",
        text="ema.py:debug",
        config=judge_plan.read(f"mamba2:{size}"),
        references={SAME_BLOCK: "", PUBLISHED: ""},
        domains=("arxiv",),
        against=("c4",),
        manifest="m",
        rates=(1e-3,),
        reference_rates={SAME_BLOCK: 2e-3, PUBLISHED: 1e-3},
        seeds=3,
        out=Path("out"),
        cache=Path("cache"),
        warnings=(),
    )


def costs(ours=120.0, theirs=100.0, **changes):
    cost = Cost(theirs, None, CPU, 1)
    return {"ema": dataclasses.replace(cost, tokens_per_s=ours, **changes), SAME_BLOCK: cost, PUBLISHED: cost}


def said(words, gap=0.31, error=0.015, why="", found=None, size="debug", inside=None):
    gaps = None if gap is None else {"mean, equal": Measured(gap, error, 50.0)}
    inside = None if inside is None else Measured(inside, 0.01, 50.0)
    row = dataclasses.replace(ROW, gaps=gaps, verdict=Verdict(words, why), inside=inside)
    return judge_page.sentence(plan(size), row, found or costs())


FAST = "; at 128 tokens it trains 1.2 times as fast."


@pytest.mark.parametrize("words", ["costs", "costs more than 0.05"])
def test_the_sentence_of_a_mixer_that_costs(words):
    against = "out of domain against attention with the same block"
    assert said(words) == f"In this smoke test, ema costs 0.31 ± 0.03 nats {against}{FAST}"
    assert said(words, size="110m").startswith("At this scale, ema costs 0.31 ± 0.03 nats")


def test_the_sentence_says_where_a_mixer_learns_less_from_the_same_tokens():
    learns = "; after the same tokens its loss in domain is"
    assert f"(-0.025){learns} 0.26 higher; at 128 tokens" in said(
        "does not cost more than 0.05", gap=-0.025, error=None, inside=0.26
    )
    assert f"{learns} 0.051 lower" in said("gains", gap=-0.2, inside=-0.051)
    assert learns not in said("gains", gap=-0.2, inside=0.04) and learns not in said("gains")


def test_the_sentence_of_a_small_cost_says_what_it_does_not_exceed():
    text = said("costs, but not more than 0.05", gap=0.0261, error=0.005)
    assert "ema costs 0.026 ± 0.010 nats" in text and ", but not more than 0.05" in text


def test_the_sentence_of_a_mixer_that_does_not_cost_or_gains():
    text = said("does not cost more than 0.05", gap=-0.0061, error=0.005)
    assert "ema does not cost more than 0.05 nats out of domain against" in text and "(-0.006 ± 0.010)" in text
    assert "ema gains 0.12 ± 0.01 nats" in said("gains", gap=-0.12, error=0.005)


def test_the_sentence_of_a_gap_that_cannot_be_told():
    text = said("cannot tell", gap=0.03, error=None, why="one seed")
    assert "it cannot be told whether ema costs" in text and "(one seed; measured: +0.030 nats" in text
    assert "(no overlap)" in said("cannot tell", gap=None, why="no overlap")
    assert "the interval is too wide" in said("cannot tell", why="interval")
    assert "cannot be told" in judge_page.sentence(plan(), None, costs())


def test_speeds_are_compared_on_one_device_alone():
    assert said("costs", found=costs(ours=62.0)).endswith("it trains 0.62 times as fast.")
    for found in (costs(devices=frozenset({"NVIDIA H200"})), costs(ours=None)):
        assert said("costs", found=found).endswith("against attention with the same block.")
    two = costs(devices=frozenset({"cpu", "NVIDIA H200"}))
    assert any("different devices" in text for text in judge_page._of_costs(plan(), two))
    assert "shared one CPU (ema)" in judge_page._of_costs(plan(), costs(shared=2))[0]


def test_the_cost_of_runs_is_the_median_of_their_rows_and_the_highest_peak(tmp_path):
    runs = []
    for i, (speeds, peak) in enumerate([((1.0, 10.0, 12.0), 3.0), ((11.0, 13.0), 4.0)]):
        run = Run(i, f"{i}", tmp_path / f"{i}", None, model="ema")
        run.workdir.mkdir()
        rows = [{"step": n, "tokens_per_s": speed, "device_peak_gib": peak} for n, speed in enumerate(speeds)]
        (run.workdir / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        (run.workdir / "run.json").write_text('{"device": "NVIDIA H200"}')
        runs.append(run)
    judge_page.note_jobs(runs[0], jobs=2)
    judge_page.note_jobs(runs[0], jobs=1)
    assert judge_page.cost(runs) == Cost(11.0, 4.0, frozenset({"NVIDIA H200"}), 2)
    assert judge_page.cost([]) == Cost(None, None, frozenset(), 1)


def test_the_state_of_attention_grows_and_that_of_a_recurrent_mixer_does_not():
    states = {}
    for name in ("transformer_pp", "mamba2"):
        run = Run(0, name, Path(name), judge_plan.read(f"{name}:debug"), model=name)
        states[name] = judge_page.state_bytes(run, on_cpu=True)
    assert states["transformer_pp"][128] - states["transformer_pp"][64] == 64 * 2 * 2 * 64 * 4  # K and V of two layers
    assert states["mamba2"][128] == states["mamba2"][64]


def foretell_csv(path: Path, rows) -> Path:
    """A table of `seqjax recall --foretell`: tasks with their answers and statistics."""
    lines = ["runs,task,mixers,near_an_edge,answer,statistic,value,low,high"]
    for task, mixers, answer, statistics in rows:
        lines += [f"all,{task},{mixers},0,{answer},{','.join(row)}" for row in statistics or [("", "", "", "")]]
        lines.append(f"trained,{task},{mixers},0,foretells,p,0.0001,,")
    path.write_text("\n".join(lines) + "\n")
    return path


def statistics(value, low, high, p):
    return [("rho", f"{value:.4f}", f"{low:.4f}", f"{high:.4f}"), ("p", f"{p:.4f}", "", "")]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("answer,", "", "the header has no column answer"),
        ("0.0100,,", "0.0100", r"line 3: 7 values in 9 columns"),
        ("0.0100", "o.01", "value of p of mqar is 'o.01', not a number"),
    ],
)
def test_a_damaged_table_of_tasks_is_named(tmp_path, old, new, said):
    path = foretell_csv(tmp_path / "f.csv", [("mqar", 12, "foretells", statistics(-0.9, -0.99, -0.5, 0.01))])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=f"f.csv.*{said}.*seqjax recall --foretell"):
        judge_page.foretold(path)


def test_too_few_mixers_foretell_nothing(tmp_path):
    path = foretell_csv(tmp_path / "f.csv", [("mqar", 9, "9 mixers are too few", []), ("hops", 0, "not run", [])])
    start = "No task of minutes is known to foretell the loss out of domain"
    assert judge_page.foretold(path) == f"{start} (`mqar`: 9 mixers are too few; `hops`: not run)."


@pytest.mark.parametrize(
    ("of_mqar", "answer", "said"),
    [
        (
            (-0.7, -0.9, -0.3, 0.01),
            "foretells",
            "foretells the loss out of domain best is `mqar` (rank correlation -0.70",
        ),
        (
            (-0.7, -0.9, 0.1, 0.01),
            "foretells",
            "the nearest is `mqar` (rank correlation -0.70, 95% interval -0.90 to +0.10,"
            " which contains zero; p = 0.010, 12 mixers)",
        ),
        (
            (-0.5, -0.8, -0.1, 0.2),
            "cannot tell",
            "the nearest is `mqar` (rank correlation -0.50, 95% interval -0.80 to -0.10; p = 0.200",
        ),
        ((0.7, 0.3, 0.9, 0.01), "higher scores lose more", "No task of minutes that was fixed beforehand is shown to"),
        ((-0.9, -0.95, -0.5, 0.01), "uninformative: 12 of 12 at the floor or the ceiling", "the nearest is `hops`"),
    ],
)
def test_a_task_foretells_only_with_an_interval_below_zero(tmp_path, of_mqar, answer, said):
    rows = [("mqar", 12, answer, statistics(*of_mqar)), ("hops", 11, "cannot tell", statistics(-0.1, -0.6, 0.5, 0.9))]
    assert said in judge_page.foretold(foretell_csv(tmp_path / "f.csv", [*rows, ("grammar", 0, "not run", [])]))


def test_a_score_that_was_fixed_later_is_told_beside_the_others_if_it_foretells(tmp_path):
    rows = [("mqar", 12, "cannot tell", statistics(-0.1, -0.6, 0.5, 0.9))]
    attends = ("attending taken out too", "-0.4200", "", "")
    path = foretell_csv(
        tmp_path / "f.csv", [*rows, ("fuzzy-24", 12, "foretells", [*statistics(-0.7, -0.9, -0.3, 0.01), attends])]
    )
    path.write_text(path.read_text().replace("all,fuzzy", "later,fuzzy"))
    said = judge_page.foretold(path)
    assert "the nearest is `mqar`" in said
    assert said.endswith(
        "A score that was fixed later, for new seeds, does: `fuzzy-24` (rank correlation -0.70, "
        "95% interval -0.90 to -0.30; p = 0.010, 12 mixers); without what follows from whether a mixer reads tokens "
        "of the past themselves or a state of them it is -0.42."
    )
    new = "".join(f"new,fuzzy-24,11,0,cannot tell,{line}\n" for line in ("rho,-0.5500,-0.8200,0.2300", "p,0.0960,,"))
    path.write_text(path.read_text() + new)
    assert (
        "12 mixers); but of the 11 mixers that it was not found with alone it is -0.55, p = 0.096, so that it does "
        "not hold for these; without what follows"
    ) in judge_page.foretold(path)
    held = new.replace("cannot tell", "foretells").replace("0.2300", "-0.2300").replace("0.0960", "0.0120")
    path.write_text(path.read_text().replace(new, held))
    assert (
        "12 mixers); of the 11 mixers that it was not found with alone it is -0.55, p = 0.012; without what follows"
    ) in judge_page.foretold(path)
    path.write_text(path.read_text().replace("foretells", "cannot tell"))
    assert judge_page.foretold(path).endswith("which contains zero; p = 0.900, 12 mixers).")


def test_the_recorded_table_is_there_and_another_place_is_named(tmp_path):
    assert "out of domain" in judge_page.foretold() and "missing" not in judge_page.foretold()
    assert f"{tmp_path / 'none.csv'} is missing" in judge_page.foretold(tmp_path / "none.csv")
