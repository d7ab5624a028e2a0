"""gaps.png: marks, model order, text columns, and gaps over tokens."""

import dataclasses

import numpy as np
import pytest

from seqjax.study import gaps
from seqjax.study.gaps.verdicts import LIMIT
from seqjax.study.report import forest, leaderboard
from seqjax.study.runs.record import UNITS
from tests.pictures import assert_readable, overlapping
from tests.study.gaps.studies import TOKENS, records
from tests.study.report.conftest import side


def rows_by_model(study):
    return {row.model: row for row in gaps.compare(study, "reference")}


def test_marks_match_rows(known):
    estimates = {(mark.model, mark.kind): mark.estimate for mark in forest.marks(leaderboard.compared(known))}
    rows = rows_by_model(known)
    for model in ("gain", "dear", "shrinks", "same"):
        assert estimates[model, forest.GAP] == rows[model].gap
    assert estimates["alone", forest.ONE_SEED] == rows["alone"].gap
    assert estimates["alone", forest.TUNED].value == rows["alone"].as_tuned
    assert estimates["far", forest.TOKENS] == rows["far"].at_equal_tokens.outside
    assert {model for model, kind in estimates if kind == forest.TUNED} == {"alone", "same", "far"} - {"far"}
    assert estimates["reference", forest.REFERENCE].value == 0
    assert len(estimates) == 6 + 2 + 1


def test_models_are_ordered_by_gap(known):
    compared = leaderboard.compared(known)
    assert forest.order(compared) == ["gain", "reference", "same", "alone", "dear", "shrinks", "far"]
    compared_twice = leaderboard.compared(dataclasses.replace(known, references=("reference", "dear")))
    to_dear = [row.model for row in compared_twice["dear"] if row.gap is not None]
    models = forest.order(compared_twice)
    assert [name for name in models if name in to_dear] == to_dear, "the order is by the last reference"
    assert models.index("dear") == sum(row.gap.value < 0 for row in compared_twice["dear"] if row.gap is not None)
    assert sorted(models) == sorted(known.models) and models[-1] == "far"


def test_gaps_over_tokens_match_the_synthetic_trend():
    def trend(share):
        return -0.2 * (share - 1)

    runs = [*side("reference", 0.0, seeds=2), *side("m", 0.3, seeds=2, of_end=trend), *side("n", 0.1, shares=(1.0,))]
    study = records(runs)
    along = forest.over_tokens(study, "reference", gaps.compare(study, "reference"))
    assert list(along) == ["m"], "n has one end"
    tokens, values = along["m"].T
    assert tokens == pytest.approx(TOKENS * np.array([0.5, 0.65, 0.8, 1.0]))
    assert values - values[-1] == pytest.approx([trend(share) for share in (0.5, 0.65, 0.8, 1.0)], abs=1e-6)
    assert values[-1] == pytest.approx(0.3, abs=0.02)
    single_ends = records([*side("reference", 0.0, shares=(1.0,)), *side("m", 0.3, shares=(1.0,))])
    assert forest.over_tokens(single_ends, "reference", gaps.compare(single_ends, "reference")) == {}


def test_picture_has_lines_columns_and_labels(known, composed):
    forest.gaps("gaps.png", known)
    figure = composed["gaps.png"]
    assert_readable(figure, categories=True)
    panel, along = figure.axes
    lines = ["gain", "reference", "same", "alone", "dear", "shrinks", "far"]
    assert [text.get_text() for text in panel.get_yticklabels()] == lines
    texts = {(round(text.xy[1]), text.get_text()) for text in panel.texts if hasattr(text, "xy")}
    assert {(-1, name) for name in ("seeds", "params", "edge")} <= texts and (-1, "copies") not in texts
    rows = rows_by_model(known)
    assert {(1, "3"), (1, "100M")} <= texts, "of the reference too"
    for y, model in enumerate(lines):
        if model == "reference":
            continue
        row = rows[model]
        assert {(y, str(row.seeds)), (y, "104M" if model == "dear" else "100M")} <= texts
        assert ((y, "*") in texts) == row.provisional
    assert overlapping(panel.texts) == []
    low, high = panel.get_xlim()
    for model in ("gain", "same", "alone", "dear", "shrinks"):
        assert low < rows[model].gap.value < high
    assert {text.get_text() for text in along.texts} == {"gain", "dear", "same", "shrinks", "alone"}


def test_known_copy_shares_have_a_column(known, composed):
    compared = {"reference": [dataclasses.replace(row, copy=0.5) for row in gaps.compare(known, "reference")]}
    forest.gaps("gaps.png", known, compared)
    texts = [text.get_text() for text in composed["gaps.png"].axes[0].texts]
    assert texts.count("copies") == 1 and texts.count("50%") == 6


def test_only_trending_lines_are_labelled_among_many(known, composed, monkeypatch):
    monkeypatch.setattr(forest, "NAMED", 2)
    forest.gaps("gaps.png", known)
    along = composed["gaps.png"].axes[1]
    trends = {row.model for row in gaps.compare(known, "reference") if row.trend}
    assert {text.get_text() for text in along.texts} == trends and "shrinks" in trends


def test_outlying_differences_are_written_at_the_border(composed):
    study = records([*side("reference", 0.0), *side("m", 0.1), *side("far", -5.0, last=2.0, shares=(1.0,))])
    forest.gaps("gaps.png", study)
    panel = composed["gaps.png"].axes[0]
    (row,) = [row for row in gaps.compare(study, "reference") if row.model == "far"]
    assert panel.get_xlim()[0] > -1
    assert f"← {row.at_equal_tokens.outside.value:+.2f}" in [text.get_text() for text in panel.texts]


def test_differences_are_drawn_without_any_gap(composed):
    study = records([*side("reference", 0.0, shares=(1.0,)), *side("m", 0.3, shares=(1.0,))])
    forest.gaps("gaps.png", study)
    (panel,) = composed["gaps.png"].axes
    assert [text.get_text() for text in panel.get_yticklabels()] == ["reference", "m"]
    assert "at equal tokens" in panel.get_xlabel().replace("\n", " ")
    assert forest.title(study, leaderboard.compared(study)) == (
        "OOD loss (mean of 2 domains) at equal tokens; to the right is worse"
    )


def test_band_has_the_loss_unit(known, composed):
    for unit in UNITS.values():
        forest.gaps("gaps.png", dataclasses.replace(known, unit=unit))
        band = composed["gaps.png"].axes[0].patches[0].get_extents()
        assert band.transformed(composed["gaps.png"].axes[0].transData.inverted()).x1 == pytest.approx(
            LIMIT * unit.scale
        )


def test_size_text():
    assert [forest.size_text(n) for n in (7, 821_120, 109_531_392, 1_340_000_000)] == ["7", "821k", "110M", "1.34B"]
