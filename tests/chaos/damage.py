"""Random damage to files for `tests.chaos.attacks`; each function returns a description of its damage.

The damage is always detectable. In text files without checksums, changed bytes become invalid UTF-8, because a changed
digit could not be detected, and lines are removed only from the end.
"""

import io
import json
import math
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TEXTS = (".json", ".jsonl", ".csv", ".md", ".txt", ".py")
SHAPES = [[], {}, None, "text", 7, {"a": {"b": 1}}, [[1, 2], [3]], True, [{"step": 1}], 1e308]
DEEP = 100_000


# --------------------------------------------------------------------------------------------------------------- files
Way = Callable[[Path, random.Random], str]


def damage(path: Path, draw: random.Random, *, spared: Sequence[Way] = ()) -> str:
    """Damage a file in a random way for its kind, except the ways `spared`; return the description."""
    ways: list[Way] = [truncate, empty, flip, delete, garbage, directory]
    if path.suffix in (".json", ".jsonl") or _is_json(path):
        ways += [shape, shape, nested, not_utf8, without_key, without_key, other_value, other_value]
    if path.suffix == ".npz":
        ways += [without_array, other_array, other_array, pickled]
    if path.suffix == ".csv":
        ways += [without_header, other_cell, other_cell, not_utf8]
    if path.stat().st_size == 0:
        ways = [delete, garbage, directory]
    return draw.choice([way for way in ways if way not in spared])(path, draw)


def truncate(path: Path, draw: random.Random) -> str:
    """Truncate the file."""
    content = path.read_bytes()
    length = draw.randrange(1, max(2, len(content)))
    path.write_bytes(content[:length])
    return f"cut to {length} of {len(content)} bytes"


def empty(path: Path, draw: random.Random) -> str:
    """Empty the file."""
    del draw
    path.write_bytes(b"")
    return "emptied"


def flip(path: Path, draw: random.Random) -> str:
    """Change one to eight bytes."""
    content = bytearray(path.read_bytes())
    positions = sorted(draw.randrange(len(content)) for _ in range(draw.randint(1, 8)))
    for position in positions:
        content[position] ^= 0xC0 if path.suffix in TEXTS or _is_json(path) else draw.randrange(1, 256)
        if path.suffix in TEXTS or _is_json(path):
            content[position] = 0xFF
    path.write_bytes(content)
    return f"bytes {', '.join(map(str, positions))} of {len(content)} changed"


def delete(path: Path, draw: random.Random) -> str:
    """Delete the file."""
    del draw
    path.unlink()
    return "deleted"


def garbage(path: Path, draw: random.Random) -> str:
    """Replace the content with random bytes."""
    path.write_bytes(draw.randbytes(draw.choice([1, 100, max(1, path.stat().st_size)])))
    return "random bytes"


def directory(path: Path, draw: random.Random) -> str:
    """Replace the file with a directory."""
    del draw
    path.unlink()
    path.mkdir()
    return "a directory in its place"


def _is_json(path: Path) -> bool:
    """Return whether a file without suffix is JSON, as Orbax's metadata files are."""
    return path.suffix == "" and path.is_file() and path.read_bytes()[:1] in (b"{", b"[")


def _lines(path: Path) -> tuple[list[bytes], Callable[[int, bytes], None]]:
    """Return a file's JSON texts (one per line of .jsonl) and a function that replaces a text."""
    texts = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]

    def replace(i: int, text: bytes) -> None:
        texts[i] = text
        path.write_bytes(b"\n".join(texts) + b"\n")

    return texts, replace


def shape(path: Path, draw: random.Random) -> str:
    """Replace a JSON text with a value from `SHAPES`."""
    texts, replace = _lines(path)
    value = draw.choice(SHAPES)
    replace(draw.randrange(len(texts)), json.dumps(value).encode())
    return f"JSON of another shape, {value!r}"


def nested(path: Path, draw: random.Random) -> str:
    """Replace a JSON text with deeply nested lists, closed or not."""
    texts, replace = _lines(path)
    closed = draw.random() < 0.5
    replace(draw.randrange(len(texts)), b"[" * DEEP + b"]" * DEEP * closed)
    return "JSON nested without end"


def not_utf8(path: Path, draw: random.Random) -> str:
    """Insert bytes that are not UTF-8."""
    content = path.read_bytes()
    at = draw.randrange(len(content))
    path.write_bytes(content[:at] + draw.choice([b"\xff\xfe", b"\xc3", b"\xed\xa0\x80"]) + content[at:])
    return f"not UTF-8 at byte {at}"


def _key_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the key path of each part of a JSON value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from _key_paths(part, (*path, key))


def _inside(path: Path, draw: random.Random, change: Callable[[Any, Any], None], *, keys: type) -> str:
    """Apply `change(holder, key)` to a random part of a JSON text; return its key path."""
    texts, replace = _lines(path)
    i = draw.randrange(len(texts))
    value = json.loads(texts[i])
    key_paths = [key_path for key_path in _key_paths(value) if isinstance(key_path[-1], keys)]
    if not key_paths:
        return shape(path, draw)
    # Draw the depth first, because most keys are deep.
    depth = draw.choice(sorted({len(key_path) for key_path in key_paths}))
    *outer, key = draw.choice([key_path for key_path in key_paths if len(key_path) == depth])
    holder = value
    for part in outer:
        holder = holder[part]
    change(holder, key)
    replace(i, json.dumps(value).encode())
    return ".".join(map(str, (*outer, key)))


def without_key(path: Path, draw: random.Random) -> str:
    """Remove a key."""
    return f"without {_inside(path, draw, lambda holder, key: holder.pop(key), keys=str)}"


def other_value(path: Path, draw: random.Random) -> str:
    """Replace a value with a value that has another type."""
    value = draw.choice([*SHAPES, math.nan, "\ud800", -1, 2**70])

    def change(holder: Any, key: Any) -> None:
        is_same_type = isinstance(value, type(holder[key])) or {type(value), type(holder[key])} == {int, float}
        holder[key] = [[value]] if is_same_type else value

    return f"{_inside(path, draw, change, keys=object)} is {value!a:.20}"


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def without_array(path: Path, draw: random.Random) -> str:
    """Remove an array."""
    arrays = _arrays(path)
    name = draw.choice(sorted(arrays))
    del arrays[name]
    np.savez(path, allow_pickle=False, **arrays)
    return f"without the array {name}"


def other_array(path: Path, draw: random.Random) -> str:
    """Change the shape or dtype of an array."""
    arrays = _arrays(path)
    name = draw.choice(sorted(arrays))
    x = arrays[name]
    variants = {
        "short": x[:-1] if x.ndim and len(x) else np.zeros(3, x.dtype),
        "of two more axes": x[None, None],
        "of texts": np.full(x.shape, "a"),
        "complex": np.zeros(x.shape, complex),
        "empty": np.zeros(0, x.dtype),
    }
    variant = draw.choice(sorted(variants))
    np.savez(path, allow_pickle=False, **arrays | {name: variants[variant]})
    return f"the array {name} {variant}"


def pickled(path: Path, draw: random.Random) -> str:
    """Replace an array with pickled objects; reading them would run code."""
    arrays = _arrays(path)
    name = draw.choice(sorted(arrays))
    file = io.BytesIO()
    np.lib.format.write_array(file, np.array([{"a": 1}], object), allow_pickle=True)
    with zipfile.ZipFile(path) as old:
        members = {member: old.read(member) for member in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for member, content in (members | {f"{name}.npy": file.getvalue()}).items():
            new.writestr(member, content)
    return f"the array {name} pickled"


def without_header(path: Path, draw: random.Random) -> str:
    """Remove the first line."""
    del draw
    path.write_bytes(path.read_bytes().partition(b"\n")[2])
    return "without its header"


def other_cell(path: Path, draw: random.Random) -> str:
    """Replace a cell with text, or add or remove a cell."""
    rows = path.read_text(encoding="utf-8").splitlines()
    i = draw.randrange(len(rows))
    cells = rows[i].split(",")
    j = draw.randrange(len(cells))
    kind = draw.choice(["text", "no cell", "two cells", "a quote"])
    cells[j : j + 1] = {"text": ["\x00zz"], "no cell": [], "two cells": ["1", "2"], "a quote": ['"']}[kind]
    path.write_text("\n".join([*rows[:i], ",".join(cells), *rows[i + 1 :]]) + "\n", encoding="utf-8")
    return f"line {i + 1}: {kind}"


def copy(source: Path, target: Path) -> Path:
    """Copy a file or a directory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target))
