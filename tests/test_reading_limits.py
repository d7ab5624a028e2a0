"""Endless and exploding files are refused before they are read."""

import io
import json
import os
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from seqjax import reading
from seqjax.errors import UserError
from seqjax.reading import read_arrays, read_json, read_json_lines, read_table

READERS = {
    "json": lambda path: read_json(path),
    "lines": lambda path: read_json_lines(path, dict),
    "arrays": lambda path: read_arrays(path),
    "table": lambda path: read_table(path, {"a": int}),
}
REFUSAL_BYTES = 64 << 20  # maximum memory of a refusal


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "directory", "loop"])
def test_only_regular_files_are_opened(tmp_path: Path, reader: str, kind: str):
    path = tmp_path / "x"
    if "pipe" in kind:
        os.mkfifo(tmp_path / "p")
    {
        "pipe": lambda: (tmp_path / "p").rename(path),
        "link to a pipe": lambda: path.symlink_to(tmp_path / "p"),
        "device": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
        "loop": lambda: path.symlink_to(path),
    }[kind]()
    with pytest.raises(UserError, match=r"/x (.* device;|cannot .*\()"):
        READERS[reader](path)


def sparse(path: Path, size: int) -> None:
    """Create a sparse file of zeros."""
    with path.open("wb") as file:
        file.truncate(size)


@pytest.mark.parametrize(("reader", "size"), [("json", reading.MOST_JSON), ("lines", reading.MOST_LINES)])
def test_text_size_is_limited(tmp_path: Path, reader: str, size: int):
    sparse(tmp_path / "x", size + 1)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"/x .* \d\S* (GiB|MiB), .*limit"):
        READERS[reader](tmp_path / "x")
    assert tracemalloc.get_traced_memory()[1] < REFUSAL_BYTES
    tracemalloc.stop()


def npy(shape: tuple[int, ...], data: bytes, dtype: str = "<f8") -> bytes:
    """Return an npy file with a given header and data."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"shape": shape, "fortran_order": False, "descr": dtype})
    return file.getvalue() + data


def packed(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in members.items():
            file.writestr(name, content)


def test_unpacked_array_size_is_limited(tmp_path: Path):
    """Zeros unpack to a thousand times the file size; numpy writes such files."""
    one = npy((1 << 23,), bytes(8 << 23))  # 64 MiB
    packed(tmp_path / "x.npz", {f"{i}.npy": one for i in range(9)})
    assert (tmp_path / "x.npz").stat().st_size < 1 << 20
    tracemalloc.start()
    with pytest.raises(UserError, match=r"x\.npz .* 576\.00 MiB"):
        read_arrays(tmp_path / "x.npz")
    assert tracemalloc.get_traced_memory()[1] < REFUSAL_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression_methods_are_refused(tmp_path: Path, method: int):
    """They can unpack to 10,000 times their size, and not in small pieces."""
    packed(tmp_path / "x.npz", {"a.npy": npy((1 << 20,), bytes(8 << 20))}, method)
    with pytest.raises(UserError, match=rf"'a' .*packed .* {method}\)"):
        read_arrays(tmp_path / "x.npz")


def test_false_zip_directory_is_refused(tmp_path: Path):
    """Only the declared size is unpacked."""
    path = tmp_path / "x.npz"
    packed(path, {"a.npy": npy((1 << 27,), bytes(8 << 27))})
    content = path.read_bytes()
    declared = (8 << 27) + 128
    path.write_bytes(content.replace(declared.to_bytes(4, "little"), (128).to_bytes(4, "little")))
    tracemalloc.start()
    with pytest.raises(UserError, match=r"x\.npz is damaged"):
        read_arrays(path)
    assert tracemalloc.get_traced_memory()[1] < REFUSAL_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1 << 40,), "<f8"), ((1 << 31, 1 << 31), "<f8"), ((2,), "<U100000000"), ((3,), "<f8")]
)
def test_false_npy_header_is_refused(tmp_path: Path, shape: tuple[int, ...], dtype: str):
    packed(tmp_path / "x.npz", {"a.npy": npy(shape, bytes(16), dtype)})
    with pytest.raises(UserError, match=r"'a' .* header"):
        read_arrays(tmp_path / "x.npz")


def test_files_of_runs_are_within_the_limits(tmp_path: Path):
    """Zeros compress best, and 128 MiB of them are read."""
    np.savez_compressed(tmp_path / "zeros.npz", a=np.zeros(1 << 24))
    assert read_arrays(tmp_path / "zeros.npz")["a"].sum() == 0
    (tmp_path / "rows.jsonl").write_text((json.dumps({"step": 1}) + "\n") * 100_000)
    assert len(read_json_lines(tmp_path / "rows.jsonl", {"step": int})) == 100_000


def test_check_refuses_integers_out_of_range():
    reading.check(3, range(1, 4), "f")
    for value in (0, 4, 1.0, True, "3", None):
        with pytest.raises(UserError, match=r"f: a .*integer .* 1 to 3"):
            reading.check({"a": value}, {"a": range(1, 4)}, "f")
