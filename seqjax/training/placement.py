"""What lies on each device: bytes, exactly, from shapes and shardings, and a table of the parameters."""

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from seqjax.models import Model
from seqjax.nn.params import names
from seqjax.terminal import size
from seqjax.types import Params

LONGEST = 60  # characters of a path in the table
TITLES = ("parameter", "shape", "axes", "split over", "per device")


class Kind(NamedTuple):
    """What parameters in one row of the table have in common, for one layer."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical
    split: tuple[str | None, ...]  # the mesh axis of each dimension


def bytes_per_device(shapes: Any, by_leaf: Any) -> int:
    """Return the bytes that a tree of arrays (or of their shapes) takes on each device, under a tree of shardings."""
    sizes = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, shapes, by_leaf)
    return sum(jax.tree.leaves(sizes))


def parameter_table(model: Model, by_param: Params) -> list[str]:
    """Return the lines of a table of the parameters: path, shape, logical axes, mesh axes, size on each device.

    Parameters of one kind share a row: those of all layers ("x12" behind the path is their number), and those whose
    paths differ a little ("mixer.{q,k,v}.w"). `by_param` is the tree of shardings.
    """
    axes, shapes = dict(names(model.axes)), dict(names(model.shapes))
    # Path within a block -> the places in the pattern of layers that have it, by kind; other parameters have place "".
    places: dict[tuple[str, Kind], list[str]] = collections.defaultdict(list)
    n_bytes: dict[tuple[str, str], int] = {}
    for whole_path, sharding in names(by_param):
        x, logical, split = shapes[whole_path], axes[whole_path], _split(sharding, len(axes[whole_path]))
        stacked = int(whole_path.startswith("blocks."))  # along the first dimension, the layers of a place
        place, path = whole_path.split(".", 2)[1:] if stacked else ("", whole_path)
        places[path, Kind(x.shape[stacked:], logical[stacked:], split[stacked:])].append(place)
        n_bytes[place, path] = bytes_per_device(x, sharding)

    rows: dict[tuple[tuple[str, ...], Kind], list[str]] = collections.defaultdict(list)
    for (path, kind), where in places.items():
        rows[tuple(where), kind].append(path)
    cells: list[tuple[str, ...]] = [TITLES]
    for (where, kind), paths in rows.items():
        label = _joined(paths)
        if where != ("",):
            which = "*" if len(where) == len(model.blocks) else _braces(where)
            label = f"blocks.{which}.{label} x{len(where) * model.repeats}"
        over = ", ".join(axis or "-" for axis in kind.split) if any(kind.split) else "whole"
        total = sum(n_bytes[place, path] for place in where for path in paths)
        cells.append(
            (label, " x ".join(map(str, kind.shape)), ", ".join(name or "-" for name in kind.axes), over, size(total))
        )
    cells.append(("all", "", "", "", size(sum(n_bytes.values()))))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths[:-1])), row[-1].rjust(widths[-1])])
        for row in cells
    ]


def _split(sharding: NamedSharding, n_dimensions: int) -> tuple[str | None, ...]:
    """Return the mesh axis that splits each dimension; an axis of one device splits nothing."""
    spec = (*sharding.spec, *[None] * n_dimensions)[:n_dimensions]
    return tuple(axis if axis is not None and sharding.mesh.shape[axis] > 1 else None for axis in spec)


def _joined(paths: Sequence[str]) -> str:
    """Return `mixer.{q,k,v}.w` for paths that begin and end alike; of many, some and the number of the others."""
    parts = [path.split(".") for path in paths]
    n_between = min(map(len, parts)) - 1  # at least one word of each path stays in the braces
    head = next((i for i in range(n_between) if len({p[i] for p in parts}) > 1), n_between)
    tail = next((i for i in range(n_between - head) if len({p[-1 - i] for p in parts}) > 1), n_between - head)
    between = [".".join(p[head : len(p) - tail]) for p in parts]
    text = ""
    for n_shown in range(len(between), 0, -1):
        others = [f"{len(between) - n_shown} more"] if n_shown < len(between) else []
        inside = _braces([*between[:n_shown], *others])
        text = ".".join([*parts[0][:head], inside, *parts[0][len(parts[0]) - tail :]])
        if len(text) <= LONGEST:
            break
    return text


def _braces(words: Sequence[str]) -> str:
    return "{" + ",".join(words) + "}" if len(words) > 1 else words[0]
