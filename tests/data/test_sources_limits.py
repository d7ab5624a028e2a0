"""Limits: small files that unpack to much data, and documents that are too long."""

import gzip
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from seqjax.config import DataConfig
from seqjax.data import open_corpus, shards, sources
from seqjax.data.layout import Layout
from seqjax.data.prepare import tokenize
from seqjax.data.sources import arrow as arrow_source
from seqjax.data.sources import parquet
from seqjax.errors import UserError
from tests import extras

from .conftest import prepared, row

LIMIT = 1 << 20
LAYOUT = Layout(domain="x")
PACKERS = {".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress, ".jsonl": bytes}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_TEXT", LIMIT)
    monkeypatch.setattr(sources, "MOST_UNPACKED", LIMIT)


def read(root: Path) -> int:
    (shard,) = shards.find_shards(str(root), layout=LAYOUT)
    return sum(1 for _ in shards.documents(shard, (), shards.Skipped(shard.name), layout=LAYOUT))


@pytest.mark.parametrize("ending", PACKERS)
def test_line_length_is_limited(tmp_path: Path, limits: None, ending: str):
    path = tmp_path / f"a{ending}"
    longest = json.dumps({"text": "x" * (LIMIT - 12)}).encode()
    assert len(longest) == LIMIT
    good = b'{"text": "a"}\n'
    path.write_bytes(PACKERS[ending](good + bytes(json.dumps({"text": "y" * 50_000}), "utf-8") + b"\n"))
    assert read(tmp_path) == 2
    path.write_bytes(PACKERS[ending](good + longest[:-2] + b'y"}\n'))
    with pytest.raises(UserError, match=r"line 2|record 2"):
        read(tmp_path)
    path.write_bytes(PACKERS[ending](bytes(4 * LIMIT)))
    with pytest.raises(UserError, match="line 1"):
        read(tmp_path)


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst"])
def test_unpacked_size_is_limited(tmp_path: Path, limits: None, ending: str):
    """Also if the file is streamed."""
    (tmp_path / f"a{ending}").write_bytes(PACKERS[ending](b'{"text": "a"}\n' * (1 << 17)))
    with pytest.raises(UserError, match=rf"/a\{ending} unpacks "):
        read(tmp_path)
    config = DataConfig(corpus="stream", path=str(tmp_path), train_domains=("c4",), eval_domains=("c4",))
    (tmp_path / f"a{ending}").write_bytes(PACKERS[ending](row("c4", "a") * (1 << 16)))
    with pytest.raises(UserError, match=rf"/a\{ending} unpacks "):
        open_corpus(config, seq_len=1 << 22, vocab_size=258)


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"1\n"])
def test_short_line_count_is_limited(tmp_path: Path, limits: None, line: bytes):
    """Short lines cost more time than their size suggests."""
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(line * (LIMIT // 200)))
    with pytest.raises(UserError, match=r"/a\.jsonl\.zst unpacks "):
        read(tmp_path)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_long_line_uses_bounded_memory(tmp_path: Path, pack: Callable[[bytes], bytes]):
    """With the real limits, 400 MiB of zeros use less than twice the line limit."""
    (tmp_path / f"a.jsonl.{'gz' if pack is gzip.compress else 'zst'}").write_bytes(pack(bytes(400 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="line 1"):
            read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2 * sources.MOST_TEXT
    finally:
        tracemalloc.stop()


def test_text_file_size_is_limited(tmp_path: Path, limits: None):
    (tmp_path / "a.txt").write_bytes(b"x" * LIMIT)
    assert read(tmp_path) == 1
    (tmp_path / "a.txt").write_bytes(b"x" * (LIMIT + 1))
    with pytest.raises(UserError, match=r"a\.txt"):
        read(tmp_path)


def test_parquet_dictionary_text_is_limited(tmp_path: Path, limits: None, monkeypatch: pytest.MonkeyPatch):
    """Parquet stores a repeated text once; long texts are read in smaller batches."""
    extras.need("pyarrow")
    import pyarrow.parquet

    table = pyarrow.table({"text": ["x" * (LIMIT // 8)] * 1000})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < LIMIT // 100
    monkeypatch.setattr(parquet, "BATCH_BYTES", LIMIT)
    metadata = pyarrow.parquet.ParquetFile(tmp_path / "a.parquet").metadata
    assert 1 <= parquet._batch_rows(metadata, "a", size=LIMIT) <= 8
    with pytest.raises(UserError, match=r"/a\.parquet unpacks "):
        read(tmp_path)
    table = pyarrow.table({"text": ["x" * (2 * LIMIT)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(UserError, match=r"/a\.parquet unpacks "):
        read(tmp_path)


def test_parquet_with_false_metadata_is_torn(tmp_path: Path, limits: None, monkeypatch: pytest.MonkeyPatch):
    """A declared size that is too small would let many long rows be unpacked together."""
    extras.need("pyarrow")
    import pyarrow.parquet

    monkeypatch.setattr(parquet, "BATCH_BYTES", LIMIT)
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * (LIMIT // 8)] * 3}), path, compression="zstd")
    assert read(tmp_path) == 3
    size = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0).total_uncompressed_size
    true, false = (bytes([0x16, 2 * n & 127 | 128, 2 * n >> 7 & 127 | 128, 2 * n >> 14]) for n in (size, 1000))
    content = path.read_bytes()
    assert content.count(true) == 2, "once in the column and once in the row group"
    path.write_bytes(content.replace(true, false))
    (shard,) = shards.find_shards(str(tmp_path), layout=LAYOUT)
    skipped = shards.Skipped(shard.name)
    assert list(shards.documents(shard, (), skipped, layout=LAYOUT)) == []
    assert skipped.reasons == {"torn shard": 1}


def arrow(path: Path, table: Any, compression: str | None) -> None:
    """Write a table in Arrow's streaming format."""
    import pyarrow.ipc

    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_arrow_batch_size_is_limited(tmp_path: Path, limits: None, compression: str):
    """The refusal comes before unpacking, for rows and for a dictionary."""
    extras.need("pyarrow")
    import pyarrow

    def texts(n: int) -> Any:
        return pyarrow.table({"text": pyarrow.array(["x" * (LIMIT // 4)] * n)})

    arrow(tmp_path / "a.arrow", texts(3), compression)
    assert (tmp_path / "a.arrow").stat().st_size < LIMIT // 100
    assert read(tmp_path) == 3
    long = pyarrow.DictionaryArray.from_arrays([0], ["x" * (2 * LIMIT)])
    for table in (texts(5), pyarrow.table({"text": long})):
        arrow(tmp_path / "a.arrow", table, compression)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arrow_source, "rows_of", None)
            with pytest.raises(UserError, match=r"/a\.arrow unpacks "):
                read(tmp_path)


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_rows_are_converted_one_at_a_time(tmp_path: Path, ending: str):
    """One text stored for all rows must not be copied for every row."""
    extras.need("pyarrow")
    import pyarrow.parquet

    indices = pyarrow.array([0] * 100, pyarrow.int32())
    table = pyarrow.table({"text": pyarrow.DictionaryArray.from_arrays(indices, ["x" * LIMIT])})
    if ending == "arrow":
        arrow(tmp_path / "a.arrow", table, "zstd")
    else:
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    tracemalloc.start()
    try:
        assert read(tmp_path) == 100
        assert tracemalloc.get_traced_memory()[1] < 10 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ends", [(0, -5, 10), (0, 1 << 30, 10), (0, 10, 5)])
def test_arrow_with_false_offsets_is_torn(tmp_path: Path, ends: tuple[int, ...]):
    extras.need("pyarrow")
    import pyarrow

    arrow(tmp_path / "a.arrow", pyarrow.table({"text": ["hello", "world"]}), None)
    content = (tmp_path / "a.arrow").read_bytes()
    true = struct.pack("<3i", 0, 5, 10)
    assert content.count(true) == 1
    (tmp_path / "a.arrow").write_bytes(content.replace(true, struct.pack("<3i", *ends)))
    (shard,) = shards.find_shards(str(tmp_path), layout=LAYOUT)
    skipped = shards.Skipped(shard.name)
    assert list(shards.documents(shard, (), skipped, layout=LAYOUT)) == []
    assert skipped.reasons == {"torn shard": 1}


def test_unrepresentable_values_are_skipped(tmp_path: Path):
    """Text that is not UTF-8, and a date after the year 9999."""
    extras.need("pyarrow")
    import pyarrow.parquet

    dates = pyarrow.array([2**62] * 2, pyarrow.timestamp("ms"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["hello", "world"], "url": dates}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    path = tmp_path / "a.parquet"
    path.write_bytes(content.replace(b"hello", b"h\xff\xffll"))
    (shard,) = shards.find_shards(str(tmp_path), layout=LAYOUT)
    skipped = shards.Skipped(shard.name)
    assert [document.text for document in shards.documents(shard, (), skipped, layout=LAYOUT)] == ["world"]
    assert skipped.reasons == {"not UTF-8": 1}


def test_long_shard_uses_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tokens go to a temporary file; the blocks are equal."""
    texts = [f"{i} some words" for i in range(300)]
    source = tmp_path / "source"
    source.mkdir()
    lines = [json.dumps({"text": text, "kind": "ab"[i % 3 == 0]}) for i, text in enumerate(texts)]
    (source / "a.jsonl").write_text("\n".join(lines))
    layout = Layout(domain_field="kind")
    in_memory = prepared(source, tmp_path / "in_memory", layout=layout)
    monkeypatch.setattr(tokenize, "BATCH_CHARS", 100)
    monkeypatch.setattr(tokenize, "HELD_TOKENS", 500)
    assert prepared(source, tmp_path / "pieces", layout=layout) == in_memory
