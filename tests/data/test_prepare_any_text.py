"""Text in other layouts: file formats, domains, held-out documents and errors."""

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqjax.command_line import run_command
from seqjax.commands import train as train_command
from seqjax.config import DataConfig, from_config_dict, presets
from seqjax.data import blocks, hold_out, manifests, open_corpus, sources
from seqjax.data.layout import Layout
from seqjax.data.prepare import __main__ as prepare_command
from seqjax.data.prepare.results import summary
from seqjax.data.sources.parquet import Parquet
from seqjax.errors import UserError
from tests import extras

from .conftest import contents, prepared, row, some_text, write_corpus, write_shard

TEXTS = [f"{i} {some_text(np.random.default_rng(i), 12)}" for i in range(60)]


def lines(texts: list[str], *, field: str = "text", **more: Any) -> list[bytes]:
    return [json.dumps({field: text, **more}).encode() + b"\n" for text in texts]


def write_gzip(path: Path, content: list[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(b"".join(content)))
    return path


def documents(out: Path, manifest: dict[str, Any], split: str, domain: str) -> list[str]:
    """Return the texts in byte blocks; the last one may be truncated."""
    source = blocks.RecordBlocks(out, manifest["splits"][split][domain], block=manifest["block"], vocab_size=258)
    tokens = np.frombuffer(b"".join(source[i] for i in range(len(source))), "<u2")
    text = "".join("\0" if i == 256 else "" if i > 256 else chr(i) for i in tokens).encode("latin-1").decode("utf-8")
    return text.split("\0")[1:]


def count(manifest: dict[str, Any], key: str = "documents") -> dict[str, int]:
    splits = manifest["splits"]
    return {f"{split}/{domain}": entry[key] for split in splits for domain, entry in splits[split].items()}


def test_slimpajama_hashes_are_stable(tmp_path: Path):
    """The manifest hashes equal those that version 1 wrote."""
    source = write_corpus(tmp_path / "source", documents=5, shards=2)
    write_shard(source / "train" / "bad.jsonl.zst", [row("c4", "good"), b"{not json\n", b'{"text":"\xff"}\n'])
    everything = prepared(source, tmp_path / "all")
    assert manifests.manifest_hash(everything).startswith("7b810448dc7f58b9")
    some = prepared(source, tmp_path / "some", domains=["c4", "arxiv"], min_tokens=60, max_tokens=70)
    assert manifests.manifest_hash(some).startswith("faf3add27e9ef7b1")
    assert not {"layout", "validation", "dtype"} & everything.keys()
    assert everything["skipped"].keys() == {"count", "by_reason", "first"}


def test_file_formats_give_equal_blocks(tmp_path: Path):
    content = lines(TEXTS)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.jsonl").write_bytes(b"".join(content))
    write_shard(tmp_path / "zst" / "a.jsonl.zst", content)
    write_gzip(tmp_path / "gz" / "a.jsonl.gz", content)
    with (tmp_path / "gz" / "a.jsonl.gz").open("ab") as file:  # a second gzip member without documents
        file.write(gzip.compress(b"\n"))
    for i, text in enumerate(TEXTS):
        path = tmp_path / "txt" / f"{i:03d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    made = {}
    for kind in ("plain", "zst", "gz", "txt"):
        made[kind] = prepared(tmp_path / kind, tmp_path / f"{kind}-out", layout=Layout(domain="news"))
        assert count(made[kind]).keys() == {"train/news", "validation/news"}
        assert sum(count(made[kind]).values()) == len(TEXTS)
    assert len({manifests.manifest_hash(manifest) for manifest in made.values()}) == 1
    assert made["gz"]["skipped"]["by_reason"] == {"empty line": 1}
    assert made["gz"]["layout"]["domain"] == "news"


def test_parquet_equals_json_lines(tmp_path: Path):
    extras.need("pyarrow")
    import pyarrow.parquet

    (tmp_path / "source").mkdir()
    rows = [{"body": text, "meta": {"kind": f"K {i % 2}"}} for i, text in enumerate(TEXTS)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "source" / "a.parquet", row_group_size=7)
    layout = Layout(text_field="body", domain_field="meta.kind")
    one = prepared(tmp_path / "source", tmp_path / "one", layout=layout)
    content = [json.dumps(each).encode() + b"\n" for each in rows]
    write_gzip(tmp_path / "lines" / "a.jsonl.gz", content)
    two = prepared(tmp_path / "lines", tmp_path / "two", layout=layout)
    assert manifests.manifest_hash(one) == manifests.manifest_hash(two)
    (tmp_path / "source" / "b.parquet").write_bytes(b"PAR1 only")
    torn = prepared(tmp_path / "source", tmp_path / "torn", layout=layout)
    assert torn["skipped"]["by_reason"] == {"torn shard": 1}
    (tmp_path / "source" / "a.parquet").unlink()
    with pytest.raises(UserError, match="magic bytes"):
        prepared(tmp_path / "source", tmp_path / "only", layout=layout)
    for texts, kind in (([None, None], "null"), ([b"a", b"b"], "binary")):
        pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "source" / "b.parquet")
        with pytest.raises(UserError, match=f"body is {kind}"):
            prepared(tmp_path / "source", tmp_path / kind, layout=layout)


def test_arrow_dataset_equals_json_lines(tmp_path: Path):
    """Each split is a folder with files in Arrow's streaming format."""
    extras.need("pyarrow")
    import pyarrow.ipc

    for split, texts in {"train": TEXTS[:-5], "validation": TEXTS[-5:]}.items():
        path = tmp_path / "source" / split / "data-00000-of-00001.arrow"
        path.parent.mkdir(parents=True)
        (path.parent / "state.json").write_text("{}")
        table = pyarrow.Table.from_pylist([{"text": text} for text in texts])
        with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
        write_shard(tmp_path / "lines" / f"{split}-00000-of-00001.jsonl.zst", lines(texts))
    made = [
        prepared(tmp_path / name, tmp_path / f"{name}-out", layout=Layout(domain="x")) for name in ("source", "lines")
    ]
    assert manifests.manifest_hash(made[0]) == manifests.manifest_hash(made[1])
    assert count(made[0]) == {"train/x": len(TEXTS) - 5, "validation/x": 5}
    path.write_bytes(path.read_bytes()[:200])
    torn = prepared(tmp_path / "source", tmp_path / "torn", layout=Layout(domain="x"))
    assert torn["skipped"]["by_reason"] == {"torn shard": 1}


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(UserError, match=r"pip install 'seqjax\[parquet\]'"):
        Parquet.require()
    with pytest.raises(UserError, match=r"pip install 'seqjax\[parquet\]'"):
        prepared(tmp_path, tmp_path / "out")


def test_domains_from_a_field(tmp_path: Path):
    kinds = ["News & Views", "RedPajamaC4", 7, "a.b"]
    content = [line for kind in kinds for line in lines(TEXTS[:20], field="body", meta={"kind": kind})]
    content += lines(["x"], field="body", meta={"kind": "!"}) + lines(["x"], field="body")
    write_gzip(tmp_path / "source" / "a.jsonl.gz", content)
    manifest = prepared(tmp_path / "source", tmp_path / "out", layout=Layout("body", "meta.kind"))
    names = {key.partition("/")[2] for key in count(manifest)}
    assert names == {"news-views", "c4", "7", "a-b"}
    assert manifest["skipped"]["found"] == {
        "no meta.kind": {"fields body": 1},
        "no name in meta.kind": {"!": 1},
    }
    assert "news-views" in summary(manifest)


def test_domains_from_folders(tmp_path: Path):
    for folder in ("news", "Blogs/2020", "RedPajamaArXiv"):
        write_gzip(tmp_path / "source" / "train" / folder / "a.jsonl.gz", lines(TEXTS[:20]))
    write_gzip(tmp_path / "source" / "validation" / "news" / "a.jsonl.gz", lines(TEXTS[20:25]))
    manifest = prepared(tmp_path / "source", tmp_path / "out", layout=Layout(domain_from="folder"))
    assert count(manifest) == {"train/blogs": 20, "train/news": 20, "train/arxiv": 20, "validation/news": 5}
    assert "validation" not in manifest  # the source has a validation split


def test_held_out_documents_depend_only_on_text(tmp_path: Path):
    """The text decides: order and files do not matter, and no text is in both splits."""
    many = [f"{i} {some_text(np.random.default_rng(i), 6)}" for i in range(400)]
    few = TEXTS[:4]
    write_gzip(tmp_path / "a" / "many" / "a.jsonl.gz", lines(many + many[:50]))
    write_gzip(tmp_path / "a" / "few" / "a.jsonl.gz", lines(few))
    layout = Layout(domain_from="folder")
    one = prepared(tmp_path / "a", tmp_path / "one", layout=layout, validation=0.2)
    held = documents(tmp_path / "one", one, "validation", "many")[:-1]
    trained = documents(tmp_path / "one", one, "train", "many")[:-1]
    assert 50 <= len(held) <= 130
    assert not set(held) & set(trained)
    assert set(held) | set(trained) <= set(many)
    assert sum(count(one, "documents").values()) == len(many) + 50 + len(few)
    assert sum(count(one, "bytes").values()) == sum(len(t.encode()) for t in many + many[:50] + few)
    assert one["splits"]["validation"]["few"]["blocks"] >= 1
    assert one["splits"]["train"]["few"]["blocks"] >= 1
    for entry in (one["splits"][split]["many"] for split in ("train", "validation")):
        assert sum(entry["documents_by_log2_tokens"]) == entry["documents"]
        assert entry["tokens"] - entry["blocks"] * one["block"] == entry["tokens_unused"] < one["block"]
    with np.load(tmp_path / "one" / "documents.npz") as lengths:
        assert {key: len(lengths[key]) for key in lengths} == count(one)
        assert {key: lengths[key].sum() for key in lengths} == count(one, "tokens")
    # The same texts in other files and another order.
    for i in range(3):
        write_gzip(tmp_path / "b" / "many" / f"{i}.jsonl.gz", lines((many + many[:50])[::-1][i::3]))
    two = prepared(tmp_path / "b", tmp_path / "two", layout=layout, validation=0.2)
    again = documents(tmp_path / "two", two, "validation", "many")[:-1]
    assert len(set(held) ^ set(again)) <= 2  # the last text of either list may be truncated


def test_hold_out_limit_fills_a_block():
    """Whole documents fill the block, provided that a block remains for training."""
    hashes, lengths = np.array([50, 10, 40, 20, 30]), np.array([9, 2, 9, 3, 4])

    def held(*, block: int, below: int = 0, documents: int = 5) -> list[int]:
        candidates, share = hashes[:documents], below / hold_out.HASHES
        limit = hold_out.limit(candidates, lengths[:documents], share=share, block=block)
        return sorted(candidates[candidates < limit].tolist())

    assert held(block=2) == [10]
    assert held(block=3) == held(block=5) == [10, 20]
    assert held(block=6) == held(block=9) == [10, 20, 30]
    assert held(block=10) == [], "only 9 training tokens would remain"
    assert held(block=9, documents=3) == [10, 40], "9 training tokens remain, one block"
    assert held(block=5, below=25) == [10, 20], "the share exceeds a block"
    assert held(block=6, below=25) == [10, 20, 30]
    assert held(block=2, below=45) == [10, 20, 30, 40], "the share decides if it exceeds a block"


def test_text_hash_is_stable():
    """SHA-256 of "abc" starts with ba7816bf; a new hash would change the splits."""
    assert hold_out.text_hash("abc") == 0xBF1678BA


def test_single_document_is_not_held_out(tmp_path: Path):
    write_gzip(tmp_path / "source" / "a.jsonl.gz", lines([" ".join(TEXTS)]))
    manifest = prepared(tmp_path / "source", tmp_path / "out", layout=Layout(domain="book"))
    assert count(manifest) == {"train/book": 1}
    assert "No validation block of book" in summary(manifest)


@pytest.mark.parametrize(
    ("content", "layout", "domains", "message"),
    [
        (
            lines(["x"] * 300, meta={"redpajama_set_name": "News"}) + [row("RedPajamaX", "y")] * 100,
            Layout(),
            (),
            r"News: 300, RedPajamaX: 100.*--domain=NAME",
        ),
        (lines(["x"], field="body", id=1), Layout(), (), r"fields body, id: 1\).*--text_field=NAME"),
        (lines(["x"]), Layout(), (), r" meta\.redpajama_set_name \(fields text: 1\).*--domain=NAME"),
        (lines(["x"]), Layout(domain_field="kind"), (), r" kind \(fields text: 1\).*--domain_field"),
        (lines(["x"]), Layout(domain_from="folder"), (), r"no folder.*--domain=NAME"),
        ([], Layout(domain="news"), (), "1 files .* 0 lines"),
        (
            lines(["x"]),
            Layout(domain="news"),
            (),
            r"3 tokens .*\(news: 1\).*--seq_len",
        ),
        (lines(TEXTS, kind="news"), Layout(domain_field="kind"), ("nevs",), "--domains: .*nevs.*'news'"),
        ([row("c4", text) for text in TEXTS], Layout(), ("c4", "book"), "--domains: .*book.*c4"),
    ],
)
def test_empty_result_lists_the_actual_content(tmp_path: Path, content, layout, domains, message: str):
    write_gzip(tmp_path / "source" / "a.jsonl.gz", content)
    with pytest.raises(UserError, match=message):
        prepared(tmp_path / "source", tmp_path / "out", layout=layout, domains=domains)
    assert not (tmp_path / "out").exists()  # other options can then be tried with the same --out


def test_invalid_options_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="--domain_field and --domain "):
        Layout(domain_field="kind", domain="news")
    with pytest.raises(UserError, match=r"e\.g\. --domain=my-news"):
        Layout(domain="My News")
    write_gzip(tmp_path / "validation" / "a.jsonl.gz", lines(TEXTS))
    with pytest.raises(UserError, match="--validation: validation/a"):
        prepared(tmp_path, tmp_path / "out", layout=Layout(domain="news"), validation=0.1)
    with pytest.raises(UserError, match=r"--validation .*1\.5"):
        prepared(tmp_path, tmp_path / "out", validation=1.5)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"1 \.txt\b.*--domain=NAME or --domain_from=folder"):
        prepared(tmp_path / "files", tmp_path / "out")


def test_too_many_domains_are_refused(tmp_path: Path):
    content = [line for i in range(1001) for line in lines(["x"], id=i)]
    write_gzip(tmp_path / "source" / "a.jsonl.gz", content)
    with pytest.raises(UserError, match=r"1000 domains .*--domain_field"):
        prepared(tmp_path / "source", tmp_path / "out", layout=Layout(domain_field="id"))


def test_changed_layout_is_refused(tmp_path: Path):
    write_gzip(tmp_path / "source" / "a.jsonl.gz", [row("c4", text) for text in TEXTS])
    prepared(tmp_path / "source", tmp_path / "out", layout=Layout(domain="news"))
    with pytest.raises(UserError, match=r"layout \{'domain': 'news'"):  # the path contains "layout" too
        prepared(tmp_path / "source", tmp_path / "out")
    with pytest.raises(UserError, match=r"validation 0\.01 -> 0\.5"):
        prepared(tmp_path / "source", tmp_path / "out", layout=Layout(domain="news"), validation=0.5)


@pytest.mark.parametrize("damage", ["torn", "corrupt"])
def test_damaged_gzip_keeps_earlier_lines(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "CHUNK", 1024)
    path = write_gzip(
        tmp_path / "source" / "a.jsonl.gz",
        lines([f"{i} {np.random.default_rng(i).bytes(50).hex()}" for i in range(3000)]),
    )
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] if damage == "torn" else content[:half] + b"\xff" * 500 + content[half + 500 :])
    manifest = prepared(tmp_path / "source", tmp_path / "out", layout=Layout(domain="news"))
    assert manifest["skipped"]["by_reason"]["torn shard"] == 1
    assert 0 < sum(count(manifest).values()) < 3000


def test_command_passes_options_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    content = [line for kind in ("a", "b") for line in lines(TEXTS, field="body", kind=kind)]
    write_gzip(tmp_path / "source" / "a.jsonl.gz", content)
    plain = [f"--source={tmp_path / 'source'}", "--tokenizer=byte", "--seq_len=16", "--workers=1"]
    with pytest.raises(SystemExit) as ended:
        run_command(prepare_command.main, [*plain, f"--out={tmp_path / 'none'}"])
    assert ended.value.code == 2
    assert "(fields body, kind: 120)" in capsys.readouterr().err
    options = ["--text_field=body", "--domain_field=kind", "--validation=0.3"]
    prepare_command.main([*plain, *options, f"--out={tmp_path / 'one'}"])
    prepared(tmp_path / "source", tmp_path / "two", layout=Layout("body", "kind"), validation=0.3)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.fixture(scope="module")
def custom_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of three custom domains."""
    root = tmp_path_factory.mktemp("own")
    for i, name in enumerate(("news", "blogs", "law")):
        write_gzip(root / "source" / name / "a.jsonl.gz", lines([f"{name} {text}" for text in TEXTS[i:]]))
    prepared(root / "source", root / "out", layout=Layout(domain_from="folder"), validation=0.2)
    return root / "out"


def opened(path: Path, **changes: Any):
    return open_corpus(DataConfig(corpus="blocks", path=str(path), **changes), seq_len=16, vocab_size=258)


def test_custom_domains_can_be_trained_on(custom_blocks: Path):
    corpus = opened(custom_blocks, train_domains=("news",))
    assert corpus.train_domains == ("news",)
    assert corpus.eval_domains == ("news", "blogs", "law")
    assert corpus.in_domain == {"news"}
    iterator = corpus.train_iterator(batch_size=2)
    assert next(iterator)["tokens"].shape == (2, 17)
    iterator.close()
    assert len(corpus.eval_blocks("law", count=3).tokens) == 3
    assert opened(custom_blocks, train_domains=("news",), eval_domains=("law", "news")).eval_domains == ("news", "law")
    assert opened(custom_blocks, regime="mixed").train_domains == ("blogs", "law", "news")


def test_missing_custom_domains_are_refused(custom_blocks: Path):
    with pytest.raises(UserError, match=r"blogs, law, news.*config\.data\.train_domains"):
        opened(custom_blocks)
    with pytest.raises(UserError, match=r"train_domains: 'new' .*'news'.*blogs, law, news"):
        opened(custom_blocks, train_domains=("new",))
    with pytest.raises(UserError, match="eval_domains: 'c4'"):
        opened(custom_blocks, train_domains=("news",), eval_domains=("c4",))


def test_source_without_validation_holds_out_train_documents(tmp_path: Path):
    """Documents are held out of the train split only; the test split is unchanged."""
    many = [f"{i} {some_text(np.random.default_rng(i), 6)}" for i in range(400)]
    for split, texts in {"train": many, "test": TEXTS}.items():
        write_gzip(tmp_path / "source" / f"{split}-00000-of-00001.jsonl.gz", lines(texts))
    write_gzip(tmp_path / "source" / "test-00001-of-00002.jsonl.gz", lines(["short"], kind="other"))
    manifest = prepared(tmp_path / "source", tmp_path / "out", layout=Layout(domain="x"))
    counts = count(manifest)
    assert counts["test/x"] == len(TEXTS) + 1
    assert counts["train/x"] + counts["validation/x"] == len(many)
    assert 1 <= counts["validation/x"] <= 20


def test_arrow_without_validation_equals_json_lines(tmp_path: Path):
    """Split folders and split names in files both give the blocks of JSON lines."""
    extras.need("pyarrow")
    import pyarrow.ipc

    many = [f"{i} {some_text(np.random.default_rng(i), 6)}" for i in range(400)]
    for split, texts in {"train": many, "test": TEXTS}.items():
        table = pyarrow.Table.from_pylist([{"text": text} for text in texts])
        for path in (tmp_path / "saved" / split / "data.arrow", tmp_path / "cached" / f"news-{split}.arrow"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, max_chunksize=7)
        write_gzip(tmp_path / "lines" / f"{split}.jsonl.gz", lines(texts))
    names = ("lines", "saved", "cached")
    made = [prepared(tmp_path / name, tmp_path / f"{name}-out", layout=Layout(domain="x")) for name in names]
    held = sum(hold_out.text_hash(text) < hold_out.SHARE * hold_out.HASHES for text in many)
    assert count(made[0]) == {"test/x": len(TEXTS), "train/x": len(many) - held, "validation/x": held}
    assert held >= 1
    assert made[1]["splits"] == made[2]["splits"] == made[0]["splits"]


@pytest.mark.parametrize("share", [0.3, 0.01, 0.9])
def test_few_documents_leave_both_splits_nonempty(tmp_path: Path, share: float):
    """A domain's few documents may all have hashes on one side of the share."""
    texts = [some_text(np.random.default_rng(i), 20) for i in range(200)]
    low, high = sorted(texts, key=hold_out.text_hash)[:3], sorted(texts, key=hold_out.text_hash)[-3:]
    for name, chosen in {"low": low, "high": high}.items():
        for i, text in enumerate(chosen):
            path = tmp_path / "source" / name / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    manifest = prepared(tmp_path / "source", tmp_path / "out", layout=Layout(domain_from="folder"), validation=share)
    assert {(split, name) for split, of in manifest["splits"].items() for name in of if of[name]["blocks"]} == {
        (split, name) for split in ("train", "validation") for name in ("low", "high")
    }


def test_indivisible_domain_is_refused_with_working_remedies(tmp_path: Path, capsys):
    for name, size in {"short": 300, "long": 900}.items():
        (tmp_path / "source" / name).mkdir(parents=True)
        for i in range(1 if name == "short" else 4):
            (tmp_path / "source" / name / f"{i}.txt").write_text(f"{i} {some_text(np.random.default_rng(i), size)}")
    layout = Layout(domain_from="folder")
    with pytest.raises(UserError, match=r"--validation=0\.3: short .* 1 document .* --validation;"):
        prepared(tmp_path / "source", tmp_path / "out", layout=layout, validation=0.3)
    assert not (tmp_path / "out").exists()
    options = [f"--source={tmp_path / 'source'}", "--tokenizer=byte", "--seq_len=16", "--workers=1"]
    prepare_command.main([*options, "--domain_from=folder", f"--out={tmp_path / 'out'}"])
    corpus = opened_as_printed(capsys.readouterr().out)
    assert corpus.train_domains == ("long",) and corpus.eval_domains == ("long", "short")
    (tmp_path / "source" / "short" / "more.txt").write_text(some_text(np.random.default_rng(9), 300))
    prepared(tmp_path / "source", tmp_path / "more", layout=layout, validation=0.3)


def opened_as_printed(out: str):
    """Open the corpus with the training command that `prepare` prints last."""
    argv = shlex.split(out.splitlines()[-1])
    (config_flag,), overrides = train_command.split_overrides(argv[2:])
    assert "mixed" not in config_flag
    config = from_config_dict(presets.read_config(config_flag.removeprefix("--config="), overrides))
    return open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)


@pytest.mark.parametrize("documents", [(1, 1), (3, 1), (1, 4), (4, 3)])
def test_printed_command_trains_on_the_largest_domain(tmp_path: Path, capsys, documents):
    for name, n in zip(("a", "b"), documents, strict=True):
        (tmp_path / "source" / name).mkdir(parents=True)
        for i in range(n):
            (tmp_path / "source" / name / f"{i}.txt").write_text(f"{i} {some_text(np.random.default_rng(i), 300)}")
    options = [f"--source={tmp_path / 'source'}", "--tokenizer=byte", "--seq_len=16", "--workers=1"]
    prepare_command.main([*options, "--domain_from=folder", f"--out={tmp_path / 'out'}"])
    corpus = opened_as_printed(capsys.readouterr().out)
    (trained,) = corpus.train_domains
    assert trained == ("a" if documents[0] >= documents[1] else "b")
    assert {*corpus.eval_domains} - {trained} == {"a", "b"} - {trained}
    assert (trained in corpus.in_domain) == (max(documents) > 1)
    for name in corpus.eval_domains:
        assert len(corpus.eval_blocks(name, count=1).tokens) == 1
