"""Shards: finding files, reading lines and refusing invalid documents."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from seqjax.data import shards, sources
from seqjax.data.layout import Layout
from seqjax.errors import UserError

from .conftest import row, write_shard


def one(path: Path) -> shards.Shard:
    return shards.find_shards(str(path))[0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"", "empty line"),
        (b" \r", "empty line"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"text": "\\ud800", "meta": {"redpajama_set_name": "RedPajamaC4"}}', "not UTF-8"),
        (b"3", "not a JSON object"),
        (b'{"meta": {"redpajama_set_name": "RedPajamaC4"}}', "no text"),
        (b'{"text": 3, "meta": {"redpajama_set_name": "RedPajamaC4"}}', "text is an integer"),
        (b'{"text": null, "meta": {"redpajama_set_name": "RedPajamaC4"}}', "text is null"),
        ({"text": b"bytes", "meta": {"redpajama_set_name": "RedPajamaC4"}}, "text is binary"),
        (row("c4", " \n\t"), "empty document"),
        (row("RedPajamaPile", "text"), "unknown set name"),
        (b'{"text": "a", "meta": {"redpajama_set_name": 3}}', "unknown set name"),
        (b'{"text": "a", "meta": {}}', "no meta.redpajama_set_name"),
        (b'{"text": "a", "meta": 3}', "no meta.redpajama_set_name"),
    ],
)
def test_parse_refuses_bad_lines(line: bytes | dict[str, Any], reason: str):
    with pytest.raises(shards.BadLineError, match=reason):
        shards.parse(line)


def test_parse_returns_documents():
    assert shards.parse(row("arxiv", "é\u2028x")) == ("arxiv", "é\u2028x", "")
    assert shards.parse(b'{"text": "a"}', default="book") == ("book", "a", "")


OTHER_NAMES_FIRST = {
    "text": "of c4",
    "history": [{"redpajama_set_name": "RedPajamaBook"}, {"meta": {"redpajama_set_name": "RedPajamaGithub"}}],
    "meta": {"parent": {"redpajama_set_name": "RedPajamaArXiv"}, "redpajama_set_name": "RedPajamaC4"},
    "tail": {"redpajama_set_name": "RedPajamaWikipedia"},
}


def test_domain_comes_from_meta(tmp_path: Path):
    """Other objects in the row may name other domains."""
    text = '"redpajama_set_name": "RedPajamaBook"'
    lines = [json.dumps(OTHER_NAMES_FIRST).encode() + b"\n", row("c4", text), row("book", "of book")]
    skipped = shards.Skipped("a")
    documents = list(shards.documents(one(write_shard(tmp_path / "a.jsonl.zst", lines)), ("c4",), skipped))
    assert [document.text for document in documents] == ["of c4", text]
    assert skipped.elsewhere == {"book": 1}


def test_find_shards_detects_splits_and_domains(tmp_path: Path):
    for name in ("train/chunk1/a.jsonl.zst", "validation/RedPajamaArXiv/c.jsonl.zst", "test/b.jsonl.zst", "d.jsonl"):
        write_shard(tmp_path / name, [])
    (tmp_path / "README.md").touch()
    listed = shards.find_shards(str(tmp_path))
    assert [(s.split, s.name, s.layout.file_domain(s.name)) for s in listed] == [
        ("train", "d.jsonl", None),
        ("train", "train/chunk1/a.jsonl.zst", None),
        ("validation", "validation/RedPajamaArXiv/c.jsonl.zst", "arxiv"),
        ("test", "test/b.jsonl.zst", None),
    ]
    (only,) = shards.find_shards(str(tmp_path / "validation"))
    assert (only.split, only.layout.file_domain(only.name)) == ("validation", "arxiv")
    (only,) = shards.find_shards(str(tmp_path / "validation" / "*" / "*.zst"))
    assert (only.split, only.layout.file_domain(only.name)) == ("validation", "arxiv")
    (only,) = shards.find_shards(str(tmp_path / "test" / "b.jsonl.zst"))
    assert only.split == "test"


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00002.jsonl.gz", "train"),
        ("test-00000-of-00001.jsonl.gz", "test"),
        ("validation.jsonl.gz", "validation"),
        ("c4/validation-00001-of-00001.jsonl.gz", "validation"),
        ("train/test-1.jsonl.gz", "train"),  # a folder takes precedence
        ("testimony-1.jsonl.gz", "train"),
        ("my-test-1.jsonl.gz", "test"),
    ],
)
def test_split_from_file_name(tmp_path: Path, name: str, split: str):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    assert one(tmp_path).split == split


def test_parent_folder_called_test_is_ignored(tmp_path: Path):
    write_shard(tmp_path / "test" / "corpus" / "a.jsonl.zst", [])
    assert one(tmp_path / "test" / "corpus").split == "train"


def test_missing_files_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"/absent; .*shards"):
        shards.find_shards(str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"holds no .*\.jsonl"):
        shards.find_shards(str(tmp_path))
    with pytest.raises(UserError, match=r"holds no .*\.jsonl"):
        shards.find_shards(str(tmp_path / "*.jsonl.zst"))


def test_records_split_lines_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "CHUNK", 7)
    lines = [b"a" * n + b"\n" for n in (0, 1, 5, 100, 10_000, 3, 0, 2)]
    path = write_shard(tmp_path / "a.jsonl.zst", lines)
    read = []
    assert list(one(path).records(on_read=read.append)) == [line[:-1] for line in lines]
    assert sum(read) == path.stat().st_size == one(path).size
    plain = tmp_path / "b.jsonl"
    plain.write_bytes(b"".join(lines) + b"last")
    assert list(one(plain).records()) == [*(line[:-1] for line in lines), b"last"]


def test_zstd_frames_and_long_windows_are_read(tmp_path: Path):
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    long = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = long.compress(b"one\n") + long.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(frame + zstandard.compress(b"two\nthree\n"))
    assert list(one(tmp_path / "a.jsonl.zst").records()) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("damage", ["torn", "corrupt", "junk"])
def test_damaged_shard_keeps_earlier_records(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "CHUNK", 64)
    path = tmp_path / "a.jsonl.zst"
    frames = [zstandard.compress(b"".join(b"%d\n" % i for i in range(start, start + 100))) for start in (0, 100)]
    if damage == "torn":
        frames[1] = frames[1][:-20]
    elif damage == "corrupt":
        frames[1] = frames[1][:20] + b"\xff" * 40 + frames[1][60:]
    else:
        frames[1] = b"no zstd data"
    path.write_bytes(b"".join(frames))
    seen = []
    with pytest.raises(sources.TornShardError, match="zstd data"):
        for line in one(path).records():
            seen.append(line)
    assert seen[:99] == [b"%d" % i for i in range(99)]


def test_memory_file_system_is_read():
    with fsspec.open("memory://corpus/train/a.jsonl.zst", "wb") as file:
        file.write(zstandard.compress(row("c4", "in memory")))  # pyright: ignore
    (shard,) = shards.find_shards("memory://corpus")
    assert shard.split == "train"
    assert [shards.parse(line) for line in shard.records()] == [("c4", "in memory", "")]
    assert shards.find_shards("memory://corpus/*/*.zst") == [shard]


def names(source: Path | str) -> list[str]:
    return [shard.name for shard in shards.find_shards(str(source))]


def test_links_are_followed(tmp_path: Path):
    """Hugging Face caches link to directories and to files with hashes as names."""
    blobs, source = tmp_path / "blobs", tmp_path / "source"
    lines = [row("c4", "one"), row("c4", "two")]
    write_shard(blobs / "e3b0c44298", lines)
    write_shard(blobs / "more" / "b.jsonl.zst", lines)
    write_shard(source / "train" / "a.jsonl.zst", lines)
    (source / "train" / "linked.jsonl.zst").symlink_to(blobs / "e3b0c44298")
    (source / "train" / "again.jsonl.zst").symlink_to("linked.jsonl.zst")
    (source / "validation").symlink_to(blobs / "more")
    (source / "train" / "round").symlink_to(source)
    expected = ["train/a.jsonl.zst", "train/again.jsonl.zst", "train/linked.jsonl.zst", "validation/b.jsonl.zst"]
    assert names(source) == expected
    for shard in shards.find_shards(str(source)):
        assert list(shard.records()) == [line.rstrip(b"\n") for line in lines]
        assert shard.size == (source / shard.name).stat().st_size
        assert shard.split == shard.name.split("/")[0]
    (tmp_path / "all").symlink_to(source)
    assert names(tmp_path / "all") == expected
    assert names(f"{source}/*/*.zst") == expected
    assert names(f"{source}/*/*ed.jsonl.zst") == ["train/linked.jsonl.zst"]
    assert names(source / "train" / "again.jsonl.zst") == ["again.jsonl.zst"]


def test_broken_links_are_refused(tmp_path: Path):
    """A partly cleared cache must not be read as a smaller corpus."""
    write_shard(tmp_path / "a.jsonl.zst", [row("c4", "one")])
    (tmp_path / "b.jsonl.zst").symlink_to(tmp_path / "blob")
    for source in (tmp_path, f"{tmp_path}/*.zst"):
        with pytest.raises(UserError, match=r"b\.jsonl\.zst .*link"):
            names(source)


@pytest.mark.parametrize("pack", [bytes, zstandard.compress], ids=["plain", "zstd"])
def test_byte_order_mark_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack):
    monkeypatch.setattr(sources, "CHUNK", 2)
    lines = [row("c4", "first"), row("c4", "\ufeffsecond")]
    path = tmp_path / f"a.jsonl{'' if pack is bytes else '.zst'}"
    path.write_bytes(pack(b"\xef\xbb\xbf" + b"".join(lines)))
    assert [shards.parse(line).text for line in one(path).records()] == ["first", "\ufeffsecond"]


def test_json_lines_endings_ignore_case(tmp_path: Path):
    for name in ("a.jsonl", "b.ndjson", "c.JSONL", "d.NdJson"):
        (tmp_path / name).write_bytes(row("c4", name))
    (tmp_path / "e.JSONL.ZST").write_bytes(zstandard.compress(row("c4", "e")))
    listed = shards.find_shards(str(tmp_path))
    assert [shard.name for shard in listed] == ["a.jsonl", "b.ndjson", "c.JSONL", "d.NdJson", "e.JSONL.ZST"]
    assert [len(list(shard.records())) for shard in listed] == [1] * 5


@pytest.mark.parametrize(
    ("layout", "name", "meta", "domain"),
    [
        # SlimPajama's layout: the set name in the row, or the folder if the row has none
        (Layout(), "arxiv/a.jsonl", {"redpajama_set_name": "RedPajamaC4"}, "c4"),
        (Layout(), "arxiv/a.jsonl", {"redpajama_set_name": None}, "arxiv"),
        (Layout(), "arxiv/a.jsonl", {}, "arxiv"),
        (Layout(), "arxiv/a.jsonl", None, "arxiv"),
        (Layout(), "arxiv/a.jsonl", {"redpajama_set_name": "RedPajamaPile"}, None),
        (Layout(), "arxiv/a.jsonl", {"redpajama_set_name": ["RedPajamaC4"]}, None),
        (Layout(), "a.jsonl", {"redpajama_set_name": None}, None),
        (Layout(), "a.jsonl", None, None),
        # a domain field has no fallback
        (Layout(domain_field="meta.kind"), "arxiv/a.jsonl", {"kind": "News of 2024"}, "news-of-2024"),
        (Layout(domain_field="meta.kind"), "arxiv/a.jsonl", {"kind": 7}, "7"),
        (Layout(domain_field="meta.kind"), "arxiv/a.jsonl", {"kind": None}, None),
        (Layout(domain_field="meta.kind"), "arxiv/a.jsonl", {"kind": "?"}, None),
        (Layout(domain_field="meta.kind"), "arxiv/a.jsonl", {"kind": ""}, None),
        (Layout(domain_field="meta.kind"), "arxiv/a.jsonl", {}, None),
        (Layout(domain_field="meta.kind"), "arxiv/a.jsonl", None, None),
        # folders, or one name for all rows; fields are ignored
        (Layout(domain_from="folder"), "train/news/a.jsonl", {"redpajama_set_name": "RedPajamaC4"}, "news"),
        (Layout(domain_from="folder"), "train/a.jsonl", {"redpajama_set_name": "RedPajamaC4"}, None),
        (Layout(domain="news"), "arxiv/a.jsonl", {"redpajama_set_name": "RedPajamaC4"}, "news"),
    ],
)
def test_domain_precedence_in_every_layout(layout, name, meta, domain):
    record = json.dumps({"text": "a"} | ({} if meta is None else {"meta": meta})).encode()
    default = layout.file_domain(name)
    if domain is None:
        with pytest.raises(shards.BadLineError):
            shards.parse(record, default=default, layout=layout)
    else:
        assert shards.parse(record, default=default, layout=layout).domain == domain
