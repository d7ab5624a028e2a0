"""Labels of lines and points, and ticks: all labels are shown without overlap, and axes have two ticks."""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure

from seqjax import pictures
from tests.pictures import overlapping

N = 17


@pytest.mark.parametrize(
    ("low", "high"), [(1, 1.3), (487, 612), (9.5, 10.4), (1.01, 1.02), (2e5, 7e5), (3e-3, 4e-3), (1e-3, 1e3)]
)
def test_every_range_has_at_least_two_round_ticks(low, high):
    ticks = pictures.log_ticks(low, high)
    assert 2 <= len(ticks) <= 9
    assert ticks == sorted(set(ticks)) and low <= ticks[0] and ticks[-1] <= high
    assert all(len(f"{tick:g}") <= 7 for tick in ticks), "a number that nobody reads"


@pytest.mark.parametrize("requested", [[5.0] * N, list(np.linspace(0, 9, N)), [1.0, 9.0, 1.2, 4.0], [3.0]])
def test_overlapping_intervals_are_separated_within_the_range(requested):
    sizes = [0.3 + 0.02 * i for i in range(len(requested))]
    positions = pictures.apart(requested, sizes, 0.0, 10.0)
    ends = sorted((at - size / 2, at + size / 2) for at, size in zip(positions, sizes, strict=True))
    assert all(lower[1] <= upper[0] + 1e-9 for lower, upper in itertools.pairwise(ends))
    assert ends[0][0] >= -1e-9 and ends[-1][1] <= 10 + 1e-9
    assert sorted(range(len(requested)), key=positions.__getitem__) == sorted(
        range(len(requested)), key=requested.__getitem__
    )


def test_intervals_without_overlap_are_unchanged():
    assert pictures.apart([7.0, 2.0], [1.0, 1.0], 0.0, 10.0) == pytest.approx([7.0, 2.0])
    assert pictures.apart([5.0, 5.0], [1.0, 1.0], 0.0, 10.0) == pytest.approx([4.5, 5.5])
    assert pictures.apart([0.0, 0.0], [8.0, 8.0], 0.0, 10.0) == pytest.approx([1.0, 9.0]), "too much: about the middle"


def test_lines_with_close_ends_are_all_labelled():
    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    ends = []
    for i in range(N):
        panel.plot([0, 1 + 0.01 * i], [i, 3 + 0.01 * i])
        ends.append(pictures.End(1 + 0.01 * i, 3 + 0.01 * i, f"model {i}", "black"))
    pictures.label_ends({panel: ends})
    assert {text.get_text() for text in panel.texts} == {end.text for end in ends}
    figure.draw_without_rendering()
    assert overlapping(panel.texts) == []
    heights = [panel.transData.transform((0, text.get_position()[1]))[1] for text in panel.texts]
    assert heights == sorted(heights), "in the order of the lines"
    frame = panel.get_window_extent()
    assert frame.y0 <= min(heights) and max(heights) <= frame.y1


def test_points_in_a_cluster_are_all_labelled_inside_the_panel():
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    rng = np.random.default_rng(0)
    points = {f"model {i}": (float(x), float(y)) for i, (x, y) in enumerate(rng.normal(scale=0.3, size=(N, 2)))}
    for x, y in [*points.values(), (1.0, 1.0), (-1.0, -1.0)]:
        panel.plot(x, y, marker="o", linestyle="none")
    pictures.label_points({panel: {name: pictures.Named([at], "black") for name, at in points.items()}})
    assert [text.get_text() for text in panel.texts] == list(points)
    figure.draw_without_rendering()
    assert overlapping(panel.texts) == []
    frame, markers = panel.get_window_extent(), panel.transData.transform(list(points.values()))
    for text in panel.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        assert not any(box.contains(*marker) for marker in markers), f"{text.get_text()} covers a point"


def test_no_label_of_a_dense_cluster_is_cut(monkeypatch):
    monkeypatch.setattr(pictures, "TRIES", 1)  # further tries take seconds each
    figure = Figure(figsize=(6, 5), layout="constrained")
    panel = figure.subplots()
    points = np.random.default_rng(0).normal(scale=0.3, size=(44, 2)).tolist()
    for x, y in [*points, (1.0, 1.0), (-1.0, -1.0)]:
        panel.plot(x, y, marker="o", linestyle="none")
    names = {f"a model of setting {i}": pictures.Named([(x, y)], "black") for i, (x, y) in enumerate(points)}
    pictures.label_points({panel: names})
    figure.draw_without_rendering()
    assert overlapping(panel.texts) == []
    frame = panel.get_window_extent()
    for box in (text.get_window_extent() for text in panel.texts):
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1


def test_long_labels_at_the_edge_do_not_change_the_layout():
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = list(figure.subplots(1, 2))
    for panel in panels:
        for i in range(4):
            panel.plot(i / 10, i / 10, marker="o", linestyle="none")
        panel.margins(0.05)
    names = {f"a very long name of point {i}": pictures.Named([(i / 10, i / 10)], "black") for i in range(4)}
    pictures.label_points(dict.fromkeys(panels, names))
    before = [panel.get_window_extent().get_points() for panel in panels]
    figure.draw_without_rendering()
    assert np.allclose(before, [panel.get_window_extent().get_points() for panel in panels])  # pixels
    for panel in panels:
        frame = panel.get_window_extent()
        for box in (text.get_window_extent() for text in panel.texts):
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1


def test_a_label_is_closest_to_its_point_if_there_is_room():
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    points = {"left": (0.0, 0.0), "middle": (5.0, 5.0), "right": (10.0, 10.0)}
    for at in points.values():
        panel.plot(*at, marker="o", linestyle="none")
    panel.margins(0.2)
    pictures.label_points({panel: {name: pictures.Named([at], "black") for name, at in points.items()}})
    for text in panel.texts:
        centre = np.mean(text.get_window_extent().get_points(), 0)
        distances = {name: np.hypot(*(panel.transData.transform(at) - centre)) for name, at in points.items()}
        assert min(distances, key=distances.__getitem__) == text.get_text()
    assert len(panel.lines) == 3, "no line to a name that is close"


@pytest.mark.parametrize("text", ["$^$", "$$1 and $x_{", r"\$ $^$"])
def test_titles_with_dollar_signs_are_not_formulas(text):
    """Labels are placed before the figure is saved."""
    figure = Figure()
    panel = figure.subplots()
    figure.suptitle(text)
    panel.set_ylabel(text)
    panel.plot([0, 1], [0, 1])
    pictures.label_points({panel: {text: pictures.Named([(0, 0)], "black")}})
    pictures.label_ends({panel: [pictures.End(1, 1, text, "black")]})
    assert panel.texts[0].get_text().count("$") == text.count("$")


def test_very_long_labels_are_shortened_in_the_middle():
    assert pictures.shortened("Top-1 Chunk, best key, 32, k=4") == "Top-1 Chunk, best key, 32, k=4"
    name = f"begins {'x' * 300} ends"
    short = pictures.shortened(name)
    assert len(short) == pictures.LONGEST and short.startswith("begins") and short.endswith("ends")
    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    panel.plot([0, 1], [0, 1])
    pictures.label_ends({panel: [pictures.End(1, 1, name, "black")]})  # a warning is an error
    assert panel.get_window_extent().width > 200
