"""Share colours, logarithmic ticks and direct labels between all pictures.

A name is next to its line or point, where a reader finds it faster than in a legend. Names are moved until none
overlaps another; a thin leader line connects a distant name to its point. Positions depend on the size of the drawn
text, so call these functions last, after the axis limits are set.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.text import Annotation, Text
from matplotlib.ticker import MaxNLocator

from seqjax.escape import picture

# Okabe-Ito palette for colour-blind readers, without yellow (too faint on white).
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")

FONT_SIZE = 8.5  # points
LONGEST = 36  # characters in a name; longer names leave no room for the axes
PAD = 1.5  # points of white around a name
DISTANCES = (7.0, 12.0, 18.0, 26.0, 36.0, 48.0, 62.0, 78.0, 96.0, 120.0, 150.0)  # points from a point to its name
DIRECTIONS = np.linspace(0, 2 * np.pi, 24, endpoint=False)
LEADER = 11.0  # points: a more distant name has a leader line
ROUNDS, TRIES = 3, 6
# Position costs, added to the distance in points.
ON_NAME, OUTSIDE, CROSSED, ON_MARKER, ON_LINE = 1e5, 5e4, 1e3, 400.0, 40.0


class End(NamedTuple):
    """Hold a line's end and its name."""

    x: float
    y: float
    text: str
    color: str


def shortened(name: str) -> str:
    """Return a name for a picture, without its middle if it is longer than `LONGEST`."""
    half = LONGEST // 2
    return picture(name if len(name) <= LONGEST else f"{name[:half]}…{name[1 - half :]}")


def log_ticks(low: float, high: float) -> list[float]:
    """Return at least two round numbers between two positive numbers.

    They are 1, 2, 5, ..., or finer steps if these give too few.
    """
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [float(f"{tick:.6g}") for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks
    steps = MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10], min_n_ticks=2).tick_values(low, high)
    return [float(f"{tick:.12g}") for tick in steps if low <= tick <= high]


def label_ends(ends: Mapping[Axes, Sequence[End]], *, fontsize: float = FONT_SIZE) -> None:
    """Write names in the right margin, close to the heights of their lines' ends."""
    coordinates: dict[str, Any] = {
        "xycoords": "data",
        "textcoords": ("axes fraction", "data"),
        "annotation_clip": False,
    }
    texts: dict[Axes, list[Annotation]] = {panel: [] for panel in ends}
    for panel, panel_ends in ends.items():
        for end in panel_ends:
            line = {"arrowstyle": "-", "color": end.color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3, "alpha": 0.6}
            style: dict[str, Any] = {"color": end.color, "fontsize": fontsize, "va": "center", "arrowprops": line}
            texts[panel].append(
                panel.annotate(shortened(end.text), (end.x, end.y), xytext=(1.03, end.y), **style, **coordinates)
            )
    _lay_out(ends)
    for panel, panel_ends in ends.items():
        heights = [text.get_window_extent().height + 1 for text in texts[panel]]
        wanted = [float(panel.transData.transform((end.x, end.y))[1]) for end in panel_ends]
        frame, back = panel.get_window_extent(), panel.transData.inverted()
        for text, y in zip(texts[panel], apart(wanted, heights, frame.y0, frame.y1), strict=True):
            text.set_position((1.03, float(back.transform((frame.x0, y))[1])))


def _lay_out(panels: Iterable[Axes]) -> None:
    """Lay out the panels' figure, so positions in pixels are known."""
    for panel in list(panels)[:1]:
        figure = panel.get_figure(root=True)
        assert figure is not None
        for text in figure.findobj(Text):  # titles and labels may contain unescaped names
            assert isinstance(text, Text)
            is_tick = text.get_text().startswith(r"$\mathdefault")
            text.set_parse_math(is_tick or "$" not in text.get_text().replace(r"\$", ""))
        figure.draw_without_rendering()


def apart(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Return centres near `wanted` for intervals that must not overlap.

    The intervals have the lengths `sizes` and lie between `low` and `high` if they fit. The sum of squared moves is
    minimal: a group of touching intervals is centred on the mean of its wanted positions.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    before = np.concatenate([[0.0], np.cumsum([sizes[i] for i in order])])
    # Subtract the preceding sizes from each start: the starts then only have to be ascending.
    blocks: list[list[float]] = []  # touching intervals: mean start, number
    for start, i in zip(before, order, strict=False):
        blocks.append([wanted[i] - sizes[i] / 2 - start, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (left, n), (right, m) = blocks[-2:]
            blocks[-2:] = [[(left * n + right * m) / (n + m), n + m]]
    starts = [at for at, n in blocks for _ in range(int(n))]
    room = high - low - before[-1]
    starts = [min(max(at, low), low + room) if room >= 0 else low + room / 2 for at in starts]
    centres = [0.0] * len(wanted)
    for start, at, i in zip(before, starts, order, strict=False):
        centres[i] = float(at + start + sizes[i] / 2)
    return centres


class Named(NamedTuple):
    """Hold a model's points in a panel, and its colour.

    The name is next to the first point if it fits, else next to a later point.
    """

    points: Sequence[tuple[float, float]]
    color: str


def label_points(panels: Mapping[Axes, Mapping[str, Named]], *, fontsize: float = FONT_SIZE) -> None:
    """Write names next to points without covering other names.

    If there is room, names cover no other drawn element either. Names do not take part in the figure's layout, because
    the layout would change whenever they move.
    """
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": fontsize, "ha": "center", "va": "center"}
    style["in_layout"] = False
    texts = {
        panel: {
            name: panel.annotate(
                shortened(name),
                points_and_color.points[0],
                xytext=(0, 0),
                color=points_and_color.color,
                zorder=4,
                **style,
            )
            for name, points_and_color in named.items()
        }
        for panel, named in panels.items()
    }
    _lay_out(panels)
    for panel, named in panels.items():
        _place(panel, named, texts[panel])


class _Spot(NamedTuple):
    """Hold a candidate position for a name, in pixels.

    Its fields are the cost, the centre, the point's index, the box corners, the leader line, and whether the line is
    drawn.
    """

    cost: float
    centre: np.ndarray
    index: int
    box: np.ndarray
    leader: np.ndarray
    is_far: bool


def _place(panel: Axes, named: Mapping[str, Named], texts: Mapping[str, Annotation]) -> None:
    """Move a panel's names and draw their leader lines."""
    figure = panel.get_figure(root=True)
    assert figure is not None
    scale, frame, to_display = figure.dpi / 72, panel.get_window_extent().get_points(), panel.transData
    markers, segments = _drawn(panel)
    pixels = {name: to_display.transform(np.array(one.points)) for name, one in named.items()}
    all_points = np.concatenate([*pixels.values(), np.zeros((0, 2))])
    crowding = {name: np.sort(np.hypot(*(all_points - at[0]).T))[:4].sum() for name, at in pixels.items()}
    spots: dict[str, list[_Spot]] = {}
    for name, at in pixels.items():
        extent = texts[name].get_window_extent()
        spots[name] = list(_spots(at, np.array([extent.width, extent.height]) + 2 * PAD * scale, scale))
    tries: list[dict[str, _Spot]] = []
    n_failures = dict.fromkeys(named, 0)  # how often a name had no good position
    for _ in range(TRIES):
        # Names without a good position in earlier tries choose first, then names with close neighbours.
        order = sorted(named, key=lambda name: (-n_failures[name], crowding[name]))
        tries.append(_choose(order, spots, frame, markers, segments))
        failed = [name for name, spot in tries[-1].items() if spot.cost >= ON_MARKER]
        if not failed:
            break
        for name in failed:
            n_failures[name] += 1
    best = min(tries, key=lambda chosen: sum(spot.cost for spot in chosen.values()))
    for name, spot in best.items():
        texts[name].xy = named[name].points[spot.index]
        texts[name].set_position(tuple((spot.centre - pixels[name][spot.index]) / scale))
        if spot.is_far:
            line = to_display.inverted().transform(spot.leader[0])
            panel.plot(*line.T, color=named[name].color, linewidth=0.6, alpha=0.7, scalex=False, scaley=False)


def _choose(
    order: Sequence[str],
    spots: Mapping[str, Sequence[_Spot]],
    frame: np.ndarray,
    markers: np.ndarray,
    segments: np.ndarray,
) -> dict[str, _Spot]:
    """Return a position per name, chosen greedily in `order`, with costs.

    In later rounds each name chooses again.
    """
    chosen: dict[str, _Spot] = {}
    for _ in range(ROUNDS):
        for name in order:
            others = [spot for other, spot in chosen.items() if other != name]
            leaders = np.concatenate([spot.leader for spot in others if spot.is_far] or [np.zeros((0, 2, 2))])
            boxes = np.array([spot.box for spot in others]).reshape(-1, 2, 2)
            best: _Spot | None = None
            for spot in spots[name]:
                box, cost = spot.box, spot.cost
                cost += 0 if (frame[0] <= box[0]).all() and (box[1] <= frame[1]).all() else OUTSIDE
                if best is not None and cost >= best.cost:
                    continue
                overlap = ((box[0] <= boxes[:, 1]) & (boxes[:, 0] <= box[1])).all(1)
                cost += ON_NAME * int(overlap.sum()) + CROSSED * _crossed(box, leaders)
                cost += ON_MARKER * _inside(box, markers) + ON_LINE * _crossed(box, segments)
                if spot.is_far:
                    cost += CROSSED * _crossed(boxes, spot.leader)
                    cost += ON_MARKER * _near(spot.leader[0], markers)
                if best is None or cost < best.cost:
                    best = spot._replace(cost=cost)
            assert best is not None
            chosen[name] = best
    return chosen


def _spots(points: np.ndarray, size: np.ndarray, scale: float) -> Iterator[_Spot]:
    """Yield candidate positions around points for a name with a given box size.

    A candidate's box border has the candidate's distance from the point.
    """
    for i, at in enumerate(points):
        for distance in DISTANCES:
            for angle in DIRECTIONS:
                towards = np.array([np.cos(angle), np.sin(angle)])
                reach = float(np.min(size / 2 / np.maximum(np.abs(towards), 1e-9)))
                tip = at + towards * distance * scale
                centre = tip + towards * reach
                box = np.array([centre - size / 2, centre + size / 2])
                yield _Spot(distance + 4 * i, centre, i, box, np.array([[at, tip]]), distance > LEADER)


def _drawn(panel: Axes) -> tuple[np.ndarray, np.ndarray]:
    """Return a panel's drawn points [n, 2] and segments [n, 2, 2], in pixels."""
    markers, lines = [np.zeros((0, 2))], [np.zeros((0, 2, 2))]
    for line in panel.lines:
        xy = line.get_transform().transform(np.asarray(line.get_xydata(), float))
        if len(xy) and str(line.get_marker()) not in ("None", "", " "):
            markers.append(xy)
        if len(xy) > 1 and str(line.get_linestyle()) not in ("None", "", " "):
            lines.append(np.stack([xy[:-1], xy[1:]], 1))
    for collection in panel.collections:
        if isinstance(collection, LineCollection):  # bars of intervals
            bars = [collection.get_transform().transform(np.asarray(bar, float)) for bar in collection.get_segments()]
            lines += [np.stack([bar[:-1], bar[1:]], 1) for bar in bars if len(bar) > 1]
    return np.concatenate(markers), np.concatenate(lines)


def _inside(box: np.ndarray, points: np.ndarray, margin: float = 4.0) -> int:
    """Return how many points lie in or close to a box."""
    return int(((points > box[0] - margin) & (points < box[1] + margin)).all(1).sum())


def _near(segment: np.ndarray, points: np.ndarray, margin: float = 7.0) -> int:
    """Return how many points a segment passes, except points at its start."""
    start, along = segment[0], segment[1] - segment[0]
    share = np.clip((points - start) @ along / max(float(along @ along), 1e-9), 0, 1)
    close = np.hypot(*(points - start - share[:, None] * along).T) < margin
    return int((close & (np.hypot(*(points - start).T) > margin / 2)).sum())


def _crossed(box: np.ndarray, segments: np.ndarray) -> int:
    """Return how many segments meet a box, or how many boxes [n, 2, 2] meet a segment.

    Each axis limits the part of a segment that lies between the box's sides. The segment meets the box if both parts
    overlap.
    """
    start, along = segments[:, 0], segments[:, 1] - segments[:, 0]
    along = np.where(np.abs(along) < 1e-9, 1e-9, along)
    at_low, at_high = (box[..., 0, :] - start) / along, (box[..., 1, :] - start) / along
    enter, leave = np.minimum(at_low, at_high).max(1), np.maximum(at_low, at_high).min(1)
    return int(((enter <= leave) & (leave >= 0) & (enter <= 1)).sum())
