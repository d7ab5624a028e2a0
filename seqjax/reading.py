"""Read JSON, npz and CSV files; a damaged or malformed file is a `UserError`.

The one-sentence error gives the file, the fault and the fix `fix` ("" leaves the fix to the caller). The form of a JSON
value is written like the value:

    str, int, float, bool,         a value of this type; a float is finite or an integer, and an integer has 64 bits
    list, dict
    Float                          a float, NaN or an infinity
    range(a, b)                    an integer in this range
    None, "a", 1                   null, or this value
    (A, B)                         a value of the form A or of the form B
    [A]                            a list of values of the form A
    {"a": A, "b?": B, str: C}      an object with the key "a"; "b" may be missing, and other values are of the form C;
                                   int instead of str means that their keys are integers

Files may come from strangers. Only regular files are opened, because a pipe or a device never ends. Sizes are limited
before anything is read, because a few megabytes of zeros unpack to gigabytes.
"""

import csv
import io
import itertools
import json
import math
import os
import stat
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.errors import UserError, first_line
from seqjax.terminal import size

FIX = "restore it, or create it again elsewhere"
DEEPEST = 100  # JSON levels, because code that reads a value may recurse
MOST_JSON = 64 << 20  # bytes per JSON file; parsed empty lists take 20 times the size
MOST_LINES = 1 << 30  # bytes per file of rows
# An npz file's arrays may have MOST_ARRAYS bytes, or PACKED times the file size if this is more.
MOST_ARRAYS, PACKED = 512 << 20, 64


class Float(float):
    """The form for a number that may be NaN or infinite."""


KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "an integer",
    float: "a number",
    Float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def check(value: Any, form: Any, where: str | Path, *, fix: str = FIX) -> None:
    """Raise `UserError` unless a JSON value has the form; `where` gives its file."""
    if fault := _fault(value, form, ""):
        raise _error(f"{where}: {fault}", fix)


def _error(fault: str, fix: str) -> UserError:
    return UserError(f"{fault}; {fix}." if fix else fault)


def _fault(value: Any, form: Any, name: str) -> str:
    """Return how a value differs from a form, or "".

    `name` is its path, as in "runs.a.seed".
    """
    if isinstance(form, tuple):
        faults = [_fault(value, one, name) for one in form]
        return "" if "" in faults else faults[0]
    if isinstance(form, range):
        fits = _is_kind(value, int) and value in form
        return "" if fits else f"{name} is {value!r:.40}, not an integer from {form[0]:,} to {form[-1]:,}"
    if not _is_kind(value, form if isinstance(form, type) else type(form)):
        actual = KINDS[type(value)] if isinstance(value, dict | list) else f"{json.dumps(value):.40}"
        return f"{name or 'the content'} is {actual}, not {KINDS[form if isinstance(form, type) else type(form)]}"
    if isinstance(form, str | int) and value != form:
        return f"{name} is {value!r:.40}, not {form!r}"
    if not isinstance(form, dict | list):
        return ""
    parts = [(str(i), item, form[0]) for i, item in enumerate(value)] if isinstance(form, list) else []
    inside = f"{name}." if name else ""
    for key, of_key in form.items() if isinstance(form, dict) else ():
        if isinstance(key, type):
            parts += [(part, value[part], of_key) for part in value if part not in form and f"{part}?" not in form]
            if key is int and (words := [part for part in value if not part.isdecimal()]):
                return f"{inside}{words[0]} is not named after an integer"
        elif key.rstrip("?") in value:
            parts.append((key.rstrip("?"), value[key.rstrip("?")], of_key))
        elif not key.endswith("?"):
            return f"{inside}{key} is missing"
    return next(filter(None, (_fault(part, of_part, inside + key) for key, part, of_part in parts)), "")


def _is_kind(value: Any, kind: type) -> bool:
    if isinstance(value, bool):  # True is an int in Python but not in JSON
        return kind is bool
    if isinstance(value, int):
        return kind in (int, float, Float) and -(2**63) <= value < 2**63
    if isinstance(value, float):
        return kind is Float or (kind is float and math.isfinite(value))
    return isinstance(value, kind)


def _is_deep(value: Any) -> bool:
    """Return whether a JSON value has `DEEPEST` levels.

    The levels are visited in a loop, because a file may have millions of lists.
    """
    level = [value]
    for _ in range(DEEPEST):
        parts = itertools.chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [part for part in parts if isinstance(part, dict | list)]
    return bool(level)


def content(path: str | Path, *, most: int = MOST_JSON, fix: str = FIX) -> bytes:
    """Return the bytes of a regular file.

    Raises `UserError` if it cannot be read or has more than `most` bytes.
    """
    try:
        # A pipe without a writer would block here.
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise _error(f"{path} is not a file but a directory, a pipe or a device", fix)
            if (n_bytes := os.fstat(file).st_size) > most:
                raise _error(f"{path} has {size(n_bytes)}, more than the limit of {size(most)} for such a file", fix)
            return opened.read()
    except OSError as error:
        raise _error(f"{path} cannot be read ({error.strerror})", fix) from error


def parse_json(content: bytes | str, form: Any, where: str | Path, *, fix: str = FIX) -> Any:
    """Return the value of a JSON text; raise `UserError` unless it has the form.

    `where` gives its file.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
            raise RecursionError(f"more than {DEEPEST} levels")
    except (ValueError, RecursionError) as error:
        raise _error(f"{where} is not JSON ({first_line(error)})", fix) from error
    check(value, form, where, fix=fix)
    return value


def read_json(path: str | Path, form: Any = dict, *, fix: str = FIX) -> dict[str, Any]:
    """Return the object in a JSON file; raise `UserError` unless it has the form."""
    return parse_json(content(path, fix=fix), form, path, fix=fix)


def read_json_lines(path: str | Path, form: Any, *, grows: bool = False, fix: str = FIX) -> list[dict[str, Any]]:
    """Return the objects in a file with one object per line.

    Raises `UserError` unless they have the form. With `grows`, an incomplete last line, left by a killed process, is
    dropped.
    """
    *lines, last = content(path, most=MOST_LINES, fix=fix).split(b"\n")
    rows = [parse_json(line, form, f"{path}: line {i}", fix=fix) for i, line in enumerate(lines, start=1)]
    if last:
        try:
            rows.append(parse_json(last, form, f"{path}: line {len(lines) + 1}", fix=fix))
        except UserError:
            if not grows:
                raise
    return rows


class Arrays(dict[str, np.ndarray]):
    """The arrays in the file `path`, by name."""

    def __init__(self, path: str | Path, arrays: Mapping[str, np.ndarray], *, fix: str = FIX):
        super().__init__(arrays)
        self.path, self._fix = path, fix

    def take(self, name: str, kinds: str, *shape: int | None) -> np.ndarray:
        """Return an array of a numpy kind in `kinds` and of the shape (None: any size).

        Raises `UserError` if the array is missing or differs.
        """
        if name not in self:
            raise _error(f"{self.path} has no array {name!r}", self._fix)
        x = self[name]
        fits = x.ndim == len(shape) and all(n in (None, actual) for n, actual in zip(shape, x.shape, strict=True))
        if not fits or x.dtype.kind not in kinds:
            expected = f"[{', '.join('any' if n is None else str(n) for n in shape)}]"
            raise _error(f"{self.path}: the array {name!r} is {x.dtype} {[*x.shape]}, not {expected}", self._fix)
        return x


def read_arrays(path: str | Path, *, fix: str = FIX) -> Arrays:
    """Return the arrays in an npz file.

    Raises `UserError` if it is damaged, holds objects or repeats a name. Also raises it if the arrays would have more
    than `MOST_ARRAYS` bytes and more than `PACKED` times the file's bytes.
    """
    packed = content(path, most=sys.maxsize, fix=fix)
    most = max(MOST_ARRAYS, PACKED * len(packed))
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            if (declared := sum(member.file_size for member in archive.infolist())) > most:
                raise ValueError(f"its {size(len(packed))} would unpack to {size(declared)}")
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name in arrays:
                    raise ValueError(f"two arrays are named {name!r}")
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # numpy writes no others
                    raise ValueError(f"{name!r} is packed by method {member.compress_type}")
                with archive.open(member) as opened:
                    # Read the declared size: without it zipfile unpacks more. Reading all of it checks the checksum.
                    arrays[name] = _array(name, opened.read(member.file_size))
    except Exception as error:  # Damaged bytes raise nearly anything in zipfile, zlib and numpy.
        raise _error(f"{path} is damaged ({first_line(error)})", fix) from error
    return Arrays(path, arrays, fix=fix)


def _array(name: str, npy: bytes) -> np.ndarray:
    """Return an npy file's array; raise `ValueError` unless it has its header's size."""
    data = io.BytesIO(npy)
    version = np.lib.format.read_magic(data)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = header(data)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(npy) - data.tell():
        raise ValueError(f"{name!r} differs in size from its header")
    return np.lib.format.read_array(io.BytesIO(npy), allow_pickle=False)


def read_table(path: str | Path, columns: Mapping[str, type], *, fix: str = FIX) -> list[dict[str, Any]]:
    """Return the rows of a CSV file with a header; `columns` maps names to types.

    The types are str, int, float or Float. Raises `UserError` if a column is missing, a row is too short or too long,
    or a value is not a number.
    """
    rows, line = [], 1
    try:
        text = content(path, most=MOST_LINES, fix=fix).decode()
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = next(reader, [])
        if lacking := [name for name in columns if header.count(name) != 1]:
            raise ValueError(f"the header has no column {', '.join(lacking)}")
        for row in filter(None, reader):
            line = reader.line_num
            if len(row) != len(header):
                raise ValueError(f"{len(row)} values in {len(header)} columns")
            rows.append({name: kind(row[header.index(name)]) for name, kind in columns.items()})
            if fault := _fault(rows[-1], columns, ""):
                raise ValueError(fault)
        if not text.endswith("\n"):
            raise ValueError("the last line is incomplete")
    except (ValueError, csv.Error) as error:
        raise _error(f"{path}, line {line}: {first_line(error)}", fix) from error
    return rows
