"""Checks for figures: overlapping or cut texts, legends over data, ticks and sizes."""

import itertools
from collections.abc import Iterable

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text

LARGEST = (1300, 1700)  # pixels; pages are 900 to 1,000 pixels wide, and wider figures have smaller fonts
DPI = 130  # of saved figures


def overlapping(texts: Iterable[Text]) -> list[tuple[str, str]]:
    """Return the pairs of texts with overlapping boxes; the figure must be laid out."""
    # An annotation's extent would include its leader line.
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]


def shown_ticks(axis: Axis) -> list[str]:
    """Return the tick labels within an axis' limits; the figure must be laid out."""
    low, high = sorted(axis.get_view_interval())
    margin = 1e-9 * (high - low)
    ticks = [tick for tick in axis.get_major_ticks() if low - margin <= tick.get_loc() <= high + margin]
    return [tick.label1.get_text() for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]


def assert_readable(figure: Figure, *, categories: bool = False, largest: tuple[int, int] = LARGEST) -> None:
    """Check that every axis has two labelled ticks, its own or shared, and that no text is cut.

    Titles, labels and legends do not overlap, legends cover no panel, and the figure fits a page.

    `categories`: vertical axes show model names, of which there may be one.
    """
    figure.draw_without_rendering()
    for panel in (panel for panel in figure.axes if panel.axison):
        sharing = {"x": panel.get_shared_x_axes(), "y": panel.get_shared_y_axes()}
        for name in ("x",) if categories else ("x", "y"):
            axes = [getattr(other, f"{name}axis") for other in sharing[name].get_siblings(panel)]
            ticks = max((shown_ticks(axis) for axis in axes), key=len)
            assert len(set(ticks)) >= 2, f"axis {name} of {panel.get_title(loc='left')!r}: {ticks}"
    width, height = figure.get_size_inches() * DPI
    assert width <= largest[0] and height <= largest[1], f"{width:.0f} x {height:.0f} pixels"
    panels = [panel for panel in figure.axes if panel.axison]
    for legend in [*figure.legends, *(found for panel in panels if (found := panel.get_legend()))]:
        box = legend.get_window_extent()
        assert not any(box.overlaps(panel.get_window_extent()) for panel in panels), "a legend over data"
    around = [text for panel in panels for text in (panel.xaxis.label, panel.yaxis.label, panel._left_title)]
    around += [text for legend in figure.legends for text in legend.get_texts()]
    around += [text for parent in (figure, *figure.subfigs) for text in (parent._suptitle, *parent.texts) if text]
    shown = {id(text): text for text in around if text.get_visible() and text.get_text().strip()}
    assert not (pairs := overlapping(shown.values())), pairs
    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    of_ticks = {text for axis in axes for text in axis.findobj(Text) if text is not axis.label}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in of_ticks:
            box = Text.get_window_extent(text)
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.width + 1
            assert inside and box.y1 <= figure.bbox.height + 1, f"{text.get_text()!r} is cut: {box}"
