"""Document sources: in rows, in prepared blocks and in evaluation blocks."""

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqjax.config import DataConfig
from seqjax.data import Corpus, document_sources, manifests, open_corpus
from seqjax.data.document_sources import UNKNOWN, number
from seqjax.data.layout import Layout, source_of
from seqjax.data.prepare import run, tokenize
from seqjax.data.prepare.reports import read_report, write_report
from seqjax.errors import UserError
from tests import extras
from tests.golden import make_blocks, make_losses

from .conftest import SET_NAMES, contents, prepared, write_shard


def opened(path: Path, corpus: Literal["blocks", "stream"] = "blocks", *, seq_len: int = 16, **domains) -> Corpus:
    """Open the corpus in a directory; the default domain is c4."""
    domains = {"train_domains": ("c4",), "eval_domains": ("c4",)} | domains
    return open_corpus(DataConfig(corpus=corpus, path=str(path), **domains), seq_len=seq_len, vocab_size=258)


def line(domain: str, text: str, source: str | None = None, **fields) -> bytes:
    """Return a JSON line, with `meta.source` if `source` is not None."""
    meta = {"redpajama_set_name": SET_NAMES[domain]} | ({} if source is None else {"source": source})
    return json.dumps({"text": text, "meta": meta} | fields).encode() + b"\n"


def recorded(out: Path, key: str) -> list[str]:
    """Return all document source names for `key`, "SPLIT/DOMAIN"."""
    arrays = document_sources.read(out / document_sources.FILE)
    with np.load(out / "documents.npz") as file:
        n = len(file[key])
    return document_sources.names_of(arrays, key.partition("/")[2], {key: n}, np.arange(n))


@pytest.mark.parametrize(
    ("row", "domain", "source"),
    [
        ({"meta": {"source": "stacks/stacks-project:algebra.tex"}}, "arxiv", "stacks/stacks-project"),
        ({"meta": {"source": "owner/repo:A Tale: Part 2.txt"}}, "book", "owner/repo"),
        ({"meta": {"source": "rails:a.rb", "url": "https://host.org/a"}}, "c4", "rails"),
        ({"meta.source": "rails:a.rb"}, "github", "rails"),
        ({"meta": {"source": "c4", "url": "https://Host.org:443/a?b"}}, "c4", "host.org"),
        ({"meta": {"source": "https://host.org/a"}}, "commoncrawl", "host.org"),
        ({"meta": {"source": "https://other.org/a", "url": "https://host.org/a"}}, "c4", "host.org"),
        ({"url": "http://user@host.org/a"}, "crawl", "host.org"),
        ({"url": "https://arxiv.org/abs/1"}, "arxiv", ""),
        ({"meta": {"source": "arxiv", "url": "https://arxiv.org/abs/1"}}, "arxiv", ""),
        ({"url": "http://[host.org/a"}, "c4", ""),
        ({"url": "host.org/a", "meta": {"source": ":a"}}, "c4", ""),
        ({"url": 3, "meta": {"source": ["a:b"]}}, "c4", ""),
        ({"meta": "owner/repo:a"}, "c4", ""),
        ({}, "c4", ""),
    ],
)
def test_source_of_row(row: dict, domain: str, source: str):
    assert source_of({"text": "x"} | row, domain) == source


NAMES = st.sampled_from(["", "", "a/b", "a/c", "é", "\ud800"])
ROWS = st.lists(st.tuples(st.sampled_from(["c4", "arxiv"]), NAMES, st.integers(1, 40)), min_size=3, max_size=12)


@settings(deadline=None, max_examples=30)
@given(train=st.lists(ROWS, min_size=1, max_size=3), validation=ROWS, count=st.integers(1, 9))
def test_block_source_is_its_documents_source(tmp_path_factory, train, validation, count):
    root = tmp_path_factory.mktemp("sources")
    shards = {f"train/{i}": rows for i, rows in enumerate(train)} | {"validation/0": validation}
    expected: dict[str, list[str]] = {}
    for name, rows in shards.items():
        # The first document fills two blocks, so every domain can be evaluated.
        rows = [("c4", "", 40), ("arxiv", "", 40), *rows]
        lines = [line(domain, "x" * n, f"{source}:path" if source else None) for domain, source, n in rows]
        write_shard(root / "source" / f"{name}.jsonl.zst", lines)
        for domain, source, _ in rows:
            expected.setdefault(f"{name.partition('/')[0]}/{domain}", []).append(source.replace("\ud800", "\\ud800"))
    prepared(root / "source", root / "out")
    for key, names in expected.items():
        assert recorded(root / "out", key) == names
    corpus = opened(root / "out", eval_domains=("c4", "arxiv"))
    for domain, splits in (("c4", ["validation"]), ("arxiv", ["validation", "train"])):
        names = [name for split in splits for name in expected[f"{split}/{domain}"]]
        evaluation = corpus.eval_blocks(domain, count=count)
        sources = [number(names[d]) if names[d] else -1 - d for d in evaluation.documents.tolist()]
        if any(names[d] for d in evaluation.documents):
            assert evaluation.sources is not None
            assert evaluation.sources.dtype == np.int64
            assert evaluation.sources.tolist() == sources
        else:
            assert evaluation.sources is None


def test_source_numbers_identify_sources():
    names = ["a", "", "b", "a", ""]
    numbers = document_sources.numbers(names, np.array([0, 1, 2, 0, 7]))
    assert numbers is not None
    assert numbers.tolist() == [number("a"), -2, number("b"), number("a"), -8]
    assert number("a") != number("b")
    assert min(number("a"), number("b")) >= 0
    assert number("stacks/stacks-project") == 3821782880818422561  # recorded in workdirs


def test_sources_change_neither_manifest_hash_nor_blocks(tmp_path: Path):
    """The golden blocks were prepared by a version without sources."""
    golden = make_losses.unpack_blocks(tmp_path / "golden")
    make_blocks.write_source(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "named")
    for path in (tmp_path / "named").rglob("*.zst"):
        rows = [json.loads(each) for shard in run.shards.find_shards(str(path)) for each in shard.records()]
        for i, each in enumerate(rows):
            each["meta"]["source"] = f"owner/repo{i % 3}:file{i}"
        write_shard(path, [json.dumps(each).encode() + b"\n" for each in rows])
    made = {
        name: prepared(tmp_path / name, tmp_path / f"{name}-out", seq_len=make_blocks.SEQ_LEN)
        for name in ("plain", "named")
    }
    golden_hash = manifests.manifest_hash(manifests.read_manifest(golden))
    assert [manifests.manifest_hash(manifest) for manifest in made.values()] == [golden_hash, golden_hash]
    plain, named = (contents(tmp_path / f"{name}-out") for name in made)
    assert named.keys() - plain.keys() == {document_sources.FILE}
    assert [name for name in plain if plain[name] != named[name]] == ["manifest.json"]  # it lists the shard sizes
    old, new = (
        opened(path, seq_len=make_blocks.SEQ_LEN, eval_domains=("arxiv",)).eval_blocks("arxiv", count=5)
        for path in (golden, tmp_path / "named-out")
    )
    np.testing.assert_array_equal(old.tokens, new.tokens)
    assert old.sources is None
    assert new.sources is not None
    shutil.copy(tmp_path / "named-out" / document_sources.FILE, golden)
    completed = opened(golden, seq_len=make_blocks.SEQ_LEN, eval_domains=("arxiv",)).eval_blocks("arxiv", count=5)
    np.testing.assert_array_equal(completed.sources, new.sources)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three c4 shards; each document has one of two sources, or no source."""
    root = tmp_path_factory.mktemp("source")
    for split, index in (("train", 0), ("train", 1), ("validation", 0)):
        names = ["a/b:1", "a/c:2", None, "a/b:3"] * 5
        rows = [line("c4", f"{split} {index} {i} " + "y" * 3 * i, name) for i, name in enumerate(names)]
        write_shard(root / split / f"{index}.jsonl.zst", rows)
    return root


def test_held_out_documents_keep_their_sources(tmp_path: Path):
    texts = [f"document {i} " + "z" * (i % 9) for i in range(60)]
    rows = [{"text": text, "meta": {"source": f"repo{i % 7}:{i}"}} for i, text in enumerate(texts)]
    write_shard(tmp_path / "source" / "a.jsonl.zst", [json.dumps(each).encode() + b"\n" for each in rows])
    prepared(tmp_path / "source", tmp_path / "out", layout=Layout(domain="own"), validation=0.3)
    by_length = {}
    with np.load(tmp_path / "out" / "documents.npz") as file:
        for split in ("train", "validation"):
            names = recorded(tmp_path / "out", f"{split}/own")
            assert len(names) == len(file[f"{split}/own"]) > 5
            by_length |= {(split, i): (int(n), names[i]) for i, n in enumerate(file[f"{split}/own"])}
    expected = sorted((len(text) + 2, f"repo{i % 7}") for i, text in enumerate(texts))
    assert sorted(by_length.values()) == expected


def test_resumed_preparation_records_the_same_sources(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    """One part comes from a version without sources, another part has damaged sources."""
    uninterrupted = tmp_path / "uninterrupted"
    prepared(source, uninterrupted)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(run, "_remove", lambda parts: None)
        prepared(source, out)
    for path in (out / "manifest.json", out / document_sources.FILE):
        path.unlink()
    part = out / ".parts" / "000000"
    report = read_report(part.with_suffix(".json"))
    assert report is not None
    del report["files"][tokenize.SOURCES]
    part.with_suffix(tokenize.SOURCES).unlink()
    write_report(part.with_suffix(".json"), report)
    damaged = (out / ".parts" / "000001").with_suffix(tokenize.SOURCES)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    prepared(source, out)
    assert contents(out) == contents(uninterrupted)


def test_mismatched_sources_are_refused_and_can_be_deleted(tmp_path: Path, source: Path):
    prepared(source, tmp_path / "out")
    path = tmp_path / "out" / document_sources.FILE
    undamaged = path.read_bytes()
    with np.load(path) as file:
        arrays = dict(file)
    assert arrays["train/c4"].dtype == np.uint32
    changes = {
        "fewer documents": {"validation/c4": arrays["validation/c4"][:-1]},
        "fewer names": {"ends/c4": arrays["ends/c4"][:1]},
    }
    with_checksums = (tmp_path / "out" / "manifest.json").read_text()
    manifest = json.loads(with_checksums)
    del manifest["beside"]
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))  # as an earlier version wrote it
    for change in changes.values():
        np.savez(path, allow_pickle=False, **arrays | change)
        with pytest.raises(UserError, match=r"sources\.npz"):
            opened(tmp_path / "out").eval_blocks("c4", count=10**6)
    (tmp_path / "out" / "manifest.json").write_text(with_checksums)
    path.write_bytes(undamaged[: len(undamaged) // 2])
    with pytest.raises(UserError, match=r"sources\.npz is damaged"):
        opened(tmp_path / "out")
    path.unlink()
    assert opened(tmp_path / "out").eval_blocks("c4", count=10**6).sources is None


def test_stream_sources_equal_block_sources(tmp_path: Path, source: Path):
    """The numbers equal those in prepared blocks."""
    prepared(source, tmp_path / "out")
    of_blocks = opened(tmp_path / "out").eval_blocks("c4", count=10**6)
    of_stream = opened(source, "stream").eval_blocks("c4", count=10**6)
    assert of_blocks.sources is not None
    assert of_stream.sources is not None
    np.testing.assert_array_equal(of_stream.tokens, of_blocks.tokens)
    np.testing.assert_array_equal(of_stream.sources, of_blocks.sources)
    assert {number("a/b"), number("a/c")} < set(of_stream.sources.tolist())
    assert min(of_stream.sources) < 0


@pytest.mark.parametrize(
    ("layout", "columns", "expected"),
    [
        (Layout(domain="k"), ["url", "meta"], ["repo0", "repo1", "repo0", "repo1"]),
        (Layout(domain="k"), ["url"], ["h0.org", "h1.org", "h2.org", "h0.org"]),
        (Layout(domain_field="meta.kind"), ["url", "meta"], ["repo0", "repo1", "repo0", "repo1"]),
    ],
    ids=["domain option", "only url", "domain field"],
)
def test_parquet_files_have_sources(tmp_path: Path, layout: Layout, columns: list[str], expected: list[str]):
    extras.need("pyarrow")
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"text": f"text {i}", "url": f"https://h{i % 3}.org/{i}", "meta": {"kind": "k", "source": f"repo{i % 2}:{i}"}}
        for i in range(4)
    ]
    table = pyarrow.Table.from_pylist([{column: each[column] for column in ("text", *columns)} for each in rows])
    (tmp_path / "source").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "source" / "a.parquet")
    prepared(tmp_path / "source", tmp_path / "out", layout=layout, validation=0.0)
    assert recorded(tmp_path / "out", "train/k") == expected


def test_empty_source_name_is_unknown():
    names = document_sources.Names()
    assert [names.index(name) for name in ("", "a", "b", "a")] == [UNKNOWN, 0, 1, 0]
