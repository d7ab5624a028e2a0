"""losses.png: lines, panels, labels and reproducible files."""

import dataclasses

import numpy as np
import pytest

from seqjax.errors import UserError
from seqjax.escape import picture
from seqjax.study import gaps
from seqjax.study.report import figures, forest, leaderboard, points
from seqjax.study.runs import files
from tests import support
from tests.pictures import assert_readable, overlapping
from tests.study.gaps.studies import records
from tests.study.report.conftest import side

draw = figures.against_loss_in_domain


def drawn_lines(panel, i):
    """Return the i-th model's lines without legend entries."""
    return [line for line in panel.lines if line.get_color() == figures.style(i)["color"] and len(line.get_xdata())]


def linear(name, gap, *, seeds=1):
    """Return linear-schedule runs: several evaluations, the last one is the end."""
    runs = side(name, gap, seeds=seeds, rates=(1.0,))
    return [dataclasses.replace(run, ends=run.points[-1:]) for run in runs]


def test_seeds_share_a_colour_and_lines_are_labelled(composed):
    draw("losses.png", records([*side("reference", 0.0), *side("m", 0.3)]))
    figure = composed["losses.png"]
    assert_readable(figure)
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["arxiv", "github"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["seed 1", "seed 2"]
    assert [text.get_text() for text in figure.axes[-1].texts] == ["reference", "m"], "once each"
    for panel in figure.axes:
        looks = [str(line._unscaled_dash_pattern) for line in drawn_lines(panel, 1)]
        assert len(looks) == len(set(looks)) == 3, "a style for each seed, at the rate that is shown"
    (first, *_), run = drawn_lines(figure.axes[0], 1), side("m", 0.3)[0]
    assert first.get_ydata() == pytest.approx([point.domains["arxiv"] for point in run.points])


def test_ends_are_starred_among_other_evaluations(composed):
    runs = [*linear("reference", 0.0), *side("m", 0.3, rates=(1.0,), seeds=1)]
    shorter = dataclasses.replace(runs[0], ends=[runs[0].points[1], runs[0].points[-1]])
    draw("losses.png", records([shorter, *runs[1:]]))  # `records` keeps only ends
    assert not composed["losses.png"].legends, "all points are ends"
    study = dataclasses.replace(records(runs), runs=[shorter, *runs[1:]])
    draw("losses.png", study)
    panel = composed["losses.png"].axes[0]
    line, stars = drawn_lines(panel, 0)
    assert (len(line.get_xdata()), len(stars.get_xdata()), stars.get_marker()) == (4, 2, "*")
    assert stars.get_xydata()[-1] == pytest.approx(line.get_xydata()[-1])
    assert len(drawn_lines(panel, 1)) == 1
    assert [text.get_text() for text in composed["losses.png"].legends[0].get_texts()] == [figures.ENDS_LABEL]


def test_models_look_different():
    looks = [str(sorted(figures.style(i).items())) for i in range(28)]
    assert len(set(looks)) == 28


def test_many_domains_are_drawn_as_their_mean(composed, monkeypatch):
    monkeypatch.setattr(figures, "COLUMNS", 1)
    draw("losses.png", records([*side("reference", 0.0), *side("m", 0.3)]))
    (panel,) = composed["losses.png"].axes
    assert panel.get_title(loc="left") == "mean of 2 domains"
    run = side("m", 0.3)[0]
    expected = [np.mean([p.domains["arxiv"], p.domains["github"]]) for p in run.points]
    assert drawn_lines(panel, 1)[0].get_ydata() == pytest.approx(expected)


def test_model_selection_keeps_colours(composed):
    """References are always drawn; an unknown model is refused."""
    study = records([run for i, name in enumerate(("reference", "x", "y")) for run in side(name, i / 10)])
    for chosen, models in ((None, (0, 1, 2)), (["y"], (0, 2))):
        draw("losses.png", study, models=chosen)
        panel = composed["losses.png"].axes[0]
        assert [i for i in range(3) if drawn_lines(panel, i)] == list(models)
    with pytest.raises(UserError, match=r"'z'.* reference; x; y\."):
        draw("losses.png", study, models=["z"])


def test_early_losses_are_omitted(composed):
    runs = [*side("reference", 0.0, shares=(0.01, 0.5, 1.0)), *side("m", 0.0, shares=(0.01, 0.5, 1.0))]
    draw("losses.png", records(runs))
    for line in drawn_lines(composed["losses.png"].axes[0], 0):
        assert len(line.get_xdata()) == 2 and max(line.get_xdata()) < 3.02 + figures.LOSS_RANGE


def test_many_models_are_spread_over_panels(composed, monkeypatch):
    """A model's variants share a panel, references are in all panels, no point is cut."""
    monkeypatch.setattr(figures, "PANEL_MODELS", 3)
    names = ["reference", "a", "b", "a, conv", "c", "d", "a, gate", "e"]
    draw("losses.png", records([run for i, name in enumerate(names) for run in side(name, i / 10, last=3 - i / 20)]))
    figure = composed["losses.png"]
    assert_readable(figure)
    panels = [panel for panel in figure.axes if panel.axison]
    labels = [[text.get_text() for text in panel.texts] for panel in panels]
    assert labels == [["reference", "a", "a, conv", "a, gate"], ["b", "d"], ["c", "e"]]
    for panel, panel_labels in zip(panels, labels, strict=True):
        models = {*panel_labels} - {"reference"}
        drawn = [line for line in panel.lines if len(line.get_xdata())]
        model_lines = [line for line in drawn if line.get_color() != figures.GREY]
        assert len(drawn) - len(model_lines) == 1 and len(model_lines) == 3 * len(models), "of the reference one seed"
        assert len({line.get_color() for line in model_lines}) == len(models)
        low, high = panel.get_xlim()
        for line in drawn:
            assert low < min(line.get_xdata()) and max(line.get_xdata()) < high


def test_single_evaluations_are_drawn_as_points(composed):
    names = [f"model {i}" for i in range(figures.PANEL_MODELS + 1)]
    runs = [
        run
        for i, name in enumerate(names)
        for run in side(name, i / 10, last=3 + i / 10, seeds=1, rates=(1.0,), shares=(1.0,))
    ]
    draw("losses.png", records(runs, references=("model 0",)))
    assert_readable(composed["losses.png"])
    for panel, domain in zip(composed["losses.png"].axes, ("arxiv", "github"), strict=True):
        assert [text.get_text() for text in panel.texts] == names
        assert overlapping(panel.texts) == []
        markers = [line for line in panel.lines if line.get_marker() not in ("", "None")]
        for line, run in zip(markers, runs, strict=True):
            inside = np.mean([run.last.domains[name] for name in ("c4", "web")])
            assert line.get_xydata() == pytest.approx(np.array([[inside, run.last.domains[domain]]]))


def test_pictures_are_reproducible(tmp_path):
    study = records([*side("reference", 0.0), *side("m", 0.3)])
    contents = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        draw(tmp_path / name / "losses.png", study)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert contents[0]["losses.svg"].count(b"<svg ") == 1 and b"dc:date" not in contents[0]["losses.svg"]
    assert contents[0]["losses.png"].startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["linear", "sweep", "wsd"])
def test_golden_study_pictures_are_readable(name, composed):
    assert_all_readable(files.read(support.ROOT / "tests" / "golden" / "studies" / name), composed)


def assert_all_readable(study, composed):
    """Draw a study's pictures: no texts overlap, and every model is labelled."""
    compared = leaderboard.compared(study)
    draw("losses", study)
    points.gap_over_speed("cost", study, compared)
    forest.gaps("gaps", study, compared)
    points.by_rate("rates", study)
    if study.sweep:
        points.over_setting("sweep", study, compared)
    for name, figure in composed.items():
        assert_readable(figure, categories=name == "gaps")
        for panel in figure.axes:
            assert overlapping(panel.texts) == [], name
    assert {*study.models} <= {text.get_text() for panel in composed["losses"].axes for text in panel.texts}
    assert label_names(composed["rates"]) == {*study.models}
    values = {study.references[0], *leaderboard.shown(compared[study.references[0]])}
    assert label_names(composed["cost"]) == points.run_speeds(study).keys() & values
    lines = [text.get_text() for text in composed["gaps"].axes[0].get_yticklabels()]
    assert {*study.models} - {*study.references} <= {*lines} | {
        row.model for row in gaps.compare(study, study.references[0]) if row.at_equal_tokens is None
    }


def label_names(figure):
    """Return the first panel's point labels, with numbers resolved by the legend."""
    texts = [text.get_text() for text in figure.axes[0].texts]
    entries = [text.get_text().split("  ") for legend in figure.legends for text in legend.get_texts()]
    names_by_number = {number.strip("\u2007"): name for number, name in entries}
    return {names_by_number[text] if names_by_number else text for text in texts}


def test_dollar_in_a_name_is_not_math(tmp_path):
    from matplotlib.figure import Figure

    figure = Figure()
    panel = figure.subplots()
    panel.set_title("$^$")
    panel.set_xlabel(picture("$^$"))  # escaped like line labels
    figures.save(figure, tmp_path / "a.png")
    assert (tmp_path / "a.svg").is_file()
    assert (panel.get_title(), panel.get_xlabel()) == ("$^$", "$^$")
