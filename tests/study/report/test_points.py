"""Pictures with one point per model or rate."""

import dataclasses

import pytest

from seqjax.study import gaps
from seqjax.study.report import figures, points
from tests.pictures import assert_readable
from tests.study.gaps.studies import records
from tests.study.report.conftest import side

ENTROPY = {"c4": {"entropy": 2.0, "entropy_relative": 0.5}, "arxiv": {"entropy": 3.0, "entropy_relative": 0.6}}


def test_rates_picture_connects_rates_by_model(known, composed):
    points.by_rate("rates.png", known)
    (panel,) = composed["rates.png"].axes
    assert_readable(composed["rates.png"])
    assert {text.get_text() for text in panel.texts} == set(known.models)
    for i, model in enumerate(known.models):
        by_rate = gaps.rates(known, model).by_rate
        line, *markers = [line for line in panel.lines if line.get_color() == figures.style(i)["color"]]
        assert [tuple(xy) for xy in line.get_xydata()] == [(x, y) for _, x, y in by_rate.values()]
        sizes = [marker.get_markersize() for marker in markers if marker.get_marker() not in ("", "None")]
        assert sizes[: len(by_rate)] == sorted(sizes[: len(by_rate)])


def test_cost_picture_has_logged_and_measured_speeds(known, composed):
    points.gap_over_speed("cost.png", known)
    figure = composed["cost.png"]
    assert_readable(figure)
    logged, measured = figure.axes
    rows = {row.model: row.gap for row in gaps.compare(known, "reference") if row.gap is not None}
    assert {text.get_text() for text in logged.texts} == {*rows, "reference"}
    assert {text.get_text() for text in measured.texts} == {"reference", "same"}
    drawn = {
        tuple(line.get_xydata()[0]) for line in measured.lines if line.get_marker() == "o" and len(line.get_xdata())
    }
    assert drawn == {(2000.0, 0.0), (1000.0, rows["same"].value)}
    assert logged.get_ylabel() == "gap to reference\n(nats per token; lower is better)"
    assert measured.get_xlabel().replace("\n", " ") == "H200, 2,048 tokens (tokens/s)"
    assert points.run_speeds(known)["gain"] == 1400.0


def temperature_study(shares):
    runs = side("reference", 0.0, shares=shares)
    for value in (4.0, 0.25, None):
        model_runs = side(f"temperature {value}", 0.1 * (value or 9), rates=(1.0,), shares=shares)
        config = {"model": {"mixer": {"temperature": value}}}
        runs += [dataclasses.replace(run, metadata={"config": config, "entropy": ENTROPY}) for run in model_runs]
    return records(runs, sweep="model.mixer.temperature")


def test_sweep_picture_has_gap_and_entropy(composed):
    """A model without a numeric setting is omitted."""
    study = temperature_study((0.5, 1.0))
    assert points.setting_values(study) == {"temperature 4.0": 4.0, "temperature 0.25": 0.25}
    points.over_setting("sweep.png", study)
    assert_readable(composed["sweep.png"])
    gap_panel, entropies = composed["sweep.png"].axes
    rows = {row.model: row for row in gaps.compare(study, "reference")}
    lines = [line for line in gap_panel.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] == 0.25]
    assert [list(line.get_xdata()) for line in lines] == [[0.25, 4.0]] * 3, "the mean and both domains"
    expected = [rows[f"temperature {value}"].gap.value for value in (0.25, 4.0)]
    assert list(lines[0].get_ydata()) == pytest.approx(expected)
    assert expected == pytest.approx([0.025, 0.4], abs=0.02)
    assert [list(line.get_ydata()) for line in entropies.lines] == [[2.0, 2.0], [3.0, 3.0]]
    names = [text.get_text() for text in composed["sweep.png"].legends[0].get_texts()]
    assert names == ["OOD mean", "arxiv", "github", "c4"]


def test_sweep_picture_without_gaps_has_differences(composed):
    study = temperature_study((1.0,))
    points.over_setting("sweep.png", study)
    panel = composed["sweep.png"].axes[0]
    rows = {row.model: row.at_equal_tokens for row in gaps.compare(study, "reference")}
    differences = [rows[f"temperature {value}"] for value in (0.25, 4.0)]
    lines = [list(line.get_ydata()) for line in panel.lines if list(line.get_xdata()) == [0.25, 4.0]]
    assert lines == [
        pytest.approx([difference.outside.value for difference in differences]),
        pytest.approx([difference.inside.value for difference in differences]),
    ]
    assert "at equal tokens" in panel.get_ylabel()


def test_many_models_are_numbered_with_a_legend(known, composed, monkeypatch):
    monkeypatch.setattr(points, "NAMED", 2)
    for picture, draw in (("cost", points.gap_over_speed), ("rates", points.by_rate)):
        draw(picture, known)
        assert_readable(composed[picture])
        (legend,) = composed[picture].legends
        listed = [text.get_text().strip("\u2007").split("  ") for text in legend.get_texts()]
        numbers = [int(number) for number, _ in listed]
        assert numbers == list(range(len(listed), 0, -1)), "from the top, as in the panels"
        assert {text.get_text() for text in composed[picture].axes[0].texts} == {*map(str, numbers)}
    assert [name for _, name in listed] and {name for _, name in listed} == {*known.models}
