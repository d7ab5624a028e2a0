"""The remedies of `seqjax.data` for prepared blocks, the built-in corpus, streams and tokenizers."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqjax.config import DataConfig
from seqjax.data import (
    block_cache,
    blocks,
    document_index,
    open_corpus,
    pipeline,
    stream,
)
from seqjax.data.builtin import extract
from seqjax.data.prepare import Layout, prepare
from seqjax.data.shards import find_shards
from seqjax.data.tokenizer import ByteTokenizer
from tests import support
from tests.remedies.follow import Remedy, command, follow, last, write

LINE = '{"text": "hello world, hello world, hello world, number %d"}\n'
SEQ_LEN = 16


def _lines(root: Path, *paths: str, n: int = 9) -> None:
    for path in paths:
        write(root / path, "".join(LINE % i for i in range(n)))


def _prepare(root: Path, out: str = "corpus", source: str = "source", **arguments: Any) -> dict[str, Any]:
    return prepare(str(root / source), root / out, tokenizer="byte", **{"seq_len": SEQ_LEN, "workers": 1, **arguments})


def _open(root: Path, path: str | Path = "corpus", **arguments: Any) -> Any:
    seq_len, sets = arguments.pop("seq_len", SEQ_LEN), [str(root / name) for name in arguments.pop("test_sets", ())]
    path = str(path) if "://" in str(path) else str(root / path)
    data = {"corpus": "blocks", "tokenizer": "byte", "train_domains": ("c4",), "eval_domains": ("c4",)} | arguments
    return open_corpus(DataConfig(path=path, **data), seq_len=seq_len, vocab_size=264, test_sets=sets)


def _read(root: Path, path: str | Path = "corpus", **arguments: Any) -> None:
    corpus = _open(root, path, **arguments)
    corpus.train_sample("c4", count=1000)
    corpus.eval_blocks("c4", count=1000)


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[..., None]:
    """Return a `start` that changes the manifest."""

    def start(root: Path, patch: pytest.MonkeyPatch) -> None:
        del patch
        path = root / "corpus" / "manifest.json"
        change(manifest := json.loads(path.read_text()))
        path.write_text(json.dumps(manifest))

    return start


def _files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [file for domains in manifest["splits"].values() for entry in domains.values() for file in entry["files"]]


def _flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def _flipped(name: str) -> Callable[..., None]:
    return lambda root, patch: _flip(next((root / "corpus").glob(name)))


def _flip_block(root: Path, number: int) -> None:
    """Change a token in a training block."""
    [path] = (root / "corpus" / "train").glob("*")
    record = _open(root)._sources["train"]["c4"][number]
    _flip(path, path.read_bytes().index(record) + 4)


def _copy_back(root: Path, match: re.Match[str]) -> None:
    path = Path(match["path"])
    shutil.copy(root / "made" / path.relative_to(root / "corpus"), path)


def _prepare_again(root: Path, match: re.Match[str]) -> dict[str, Any]:
    """Prepare into another directory, as the command or option in the message says."""
    text = match["command"].removesuffix(" --tokenizer=...")
    text += " --source=SOURCE --out=NEW_DIR" * ("--out" not in text)
    text += " --tokenizer=byte" * ("--tokenizer" not in text) + " --seq_len=16" * ("--seq_len" not in text)
    command(f"{text} --workers=1", **{"--source=...": "--source=SOURCE", "SOURCE": f"{root}/source"}, NEW_DIR="new")
    return {"path": "new"}


def _delete_and_prepare(root: Path, match: re.Match[str]) -> None:
    shutil.rmtree(root / "corpus")
    _prepare_again(root, match)


MAKE = r"make it with `(?P<command>seqjax prepare [^`]+)`"
AGAIN = r"prepare the data again into another directory \(`(?P<command>seqjax prepare)`\)"
COPY = r"^(?P<path>\S+) is damaged.*Put back a copy of"


def _verify(root: Path, path: str = "corpus") -> None:
    _prepare(root, path, verify=True)


BLOCKS: dict[str, Remedy] = {
    "another format": Remedy(
        _read, {}, f"this seqjax reads.*{MAKE}", _prepare_again, _manifest(lambda m: m.update(format=9))
    ),
    "a version without sizes": Remedy(
        _read, {}, f"before 0.1.0; {MAKE}", _prepare_again, _manifest(lambda m: [f.pop("bytes") for f in _files(m)])
    ),
    "a file outside": Remedy(
        _read,
        {},
        f"names ../x, .*delete the directory and {MAKE}",
        _delete_and_prepare,
        _manifest(lambda m: _files(m)[0].update(path="../x")),
    ),
    "a value of another form": Remedy(
        _read, {}, f"delete the directory and {MAKE}", _delete_and_prepare, _manifest(lambda m: m.update(block="x"))
    ),
    "a file of another size": Remedy(
        _read, {}, COPY, _copy_back, lambda root, _: write(next((root / "corpus" / "train").glob("*")), "short")
    ),
    "another documents.npz": Remedy(_read, {}, COPY, _copy_back, _flipped("documents.npz")),
    "another documents.npz, elsewhere": Remedy(_read, {}, AGAIN, _prepare_again, _flipped("documents.npz")),
    "another sources.npz": Remedy(
        _read,
        {},
        r"^(?P<path>\S+) is damaged.*delete it",
        lambda _, match: Path(match["path"]).unlink(),
        _flipped("sources.npz"),
    ),
    "another block": Remedy(_read, {}, COPY, _copy_back, lambda root, _: _flip_block(root, 0)),
    "another block, elsewhere": Remedy(_read, {}, AGAIN, _prepare_again, lambda root, _: _flip_block(root, 0)),
    "a block that only --verify reads": Remedy(_verify, {}, COPY, _copy_back, lambda root, _: _flip_block(root, 1)),
    "a block that only --verify reads, elsewhere": Remedy(
        _verify, {}, AGAIN, _prepare_again, lambda root, _: _flip_block(root, 1)
    ),
    "documents of other blocks": Remedy(
        _read,
        {},
        "(?P<command>)documents.npz belongs to other blocks.*Prepare the data again into another directory",
        lambda root, _: last(_prepare(root, "new"), {"path": "new"}),
        lambda root, patch: [
            _manifest(lambda m: m.pop("beside"))(root, patch),
            document_index.write(root / "corpus" / "documents.npz", {"validation/c4": np.array([20])}),
        ],
    ),
    "damaged documents": Remedy(
        _read,
        {},
        "prepare the data again into another (?P<option>--out)",
        lambda root, _: last(_prepare(root, "new"), {"path": "new"}),
        lambda root, patch: [
            _manifest(lambda m: m.pop("beside"))(root, patch),
            write(root / "corpus" / "documents.npz", "x"),
        ],
    ),
    "a longer seq_len": Remedy(
        _read, {"seq_len": 32}, "or (?P<command>prepare again .*)\\.", lambda root, match: _as_prepare(root, match)
    ),
    "blocks of another tokenizer": Remedy(
        _read,
        {},
        "or (?P<command>prepare again .*)\\.",
        lambda root, match: _as_prepare(root, match),
        _manifest(lambda m: m["tokenizer"].update(name="mixtral", sha256="0" * 64)),
    ),
    "a misspelt domain": Remedy(
        _read,
        {"train_domains": ("c5",)},
        r"config\.data\.train_domains: .*Did you mean '(?P<to>\w+)'",
        lambda _, match: {"train_domains": (match["to"],)},
    ),
    "more files than a process may open": Remedy(
        _read,
        {},
        r"raise the limit \(`ulimit -Hn`\)",
        lambda root, _: (root / "few").unlink(),
        lambda root, patch: _few_files(root, patch, hard=100),
    ),
    "too many domains for a process": Remedy(
        _read,
        {"eval_domains": ("c4", "arxiv"), "path": "two"},
        r"list fewer domains in config\.data\.train_domains and (?P<key>eval_domains)",
        lambda _, match: {match["key"]: ("c4",)},
        lambda root, patch: [
            _lines(root, "many/train/c4/a.jsonl", "many/train/arxiv/a.jsonl", "many/validation/c4/a.jsonl"),
            _prepare(root, "two", "many"),
            _few_files(root, patch, hard=512 + 2),
        ],
    ),
    "test sets of one name": Remedy(
        _read,
        {"test_sets": ("a/set", "b/set")},
        r"(?P<a>\S+) and (?P<b>\S+) are both named 'set'.*rename one",
        lambda _, match: last(Path(match["b"]).rename(Path(match["b"]).with_name("other")), {"test_sets": SETS}),
        lambda root, _: [shutil.copytree(root / "made", root / name / "set") for name in ("a", "b")],
    ),
    "a test set without a block": Remedy(
        _read,
        {"test_sets": ("short",)},
        r"config\.eval\.path: \S+ holds no block of (?P<n>\d+) tokens; prepare longer text",
        lambda root, _: [_lines(root, "s/a/1.jsonl"), _prepare(root, "new", "s", **FOLDERS), {"test_sets": ("new",)}][
            2
        ],
        lambda root, _: [
            [write(root / "s" / name / "1.jsonl", '{"text": "eleven char"}\n') for name in ("a", "b")],
            _prepare(root, "short", "s", **FOLDERS),
        ],
    ),
    "domains of another name": Remedy(
        lambda root, **arguments: _open(root, "own", **arguments),
        {"train_domains": (), "eval_domains": ()},
        r"the domains (?P<one>\w+), .* in config\.data\.(?P<key>train_domains)",
        lambda _, match: {match["key"]: (match["one"],)},
        lambda root, _: _own(root),
    ),
    "domains of another name, all": Remedy(
        lambda root, **arguments: _open(root, "own", **arguments),
        {"train_domains": (), "eval_domains": ()},
        r"config\.data\.(?P<key>regime)='(?P<to>\w+)'",
        lambda _, match: {match["key"]: match["to"]},
        lambda root, _: _own(root),
    ),
    "no validation text": Remedy(
        lambda root, path="own": _open(root, path, train_domains=("a",), eval_domains=("a", "b")),
        {},
        r"into another (?P<out>--out) \((?P<option>--validation)=(?P<to>[\d.]+) ",
        lambda root, match: [
            _prepare(root, "new", "s", **FOLDERS | {"validation": float(match["to"])}),
            {"path": "new"},
        ][1],
        lambda root, _: _own(root, validation=0.0),
    ),
    "no validation text, other domains": Remedy(
        lambda root, **arguments: _open(root, "own", train_domains=("a",), **arguments),
        {"eval_domains": ("a", "b")},
        r"Domain '(?P<out>\w+)' has no .* out of config\.data\.(?P<key>eval_domains)",
        lambda _, match: {match["key"]: tuple({"a", "b"} - {match["out"]})},
        lambda root, _: _own(root, validation=0.0),
    ),
    "weights of 0": Remedy(
        lambda root, **arguments: _open(root, "own", **arguments),
        {"train_domains": ("a", "b"), "eval_domains": (), "weights": (1.0, 0.0)},
        r"config\.data\.(?P<key>weights): the weight of 'b' must be above (?P<least>\d)",
        lambda _, match: {match["key"]: (1.0, float(match["least"]) + 0.5)},
        lambda root, _: _own(root),
    ),
    "weights too far apart": Remedy(
        lambda root, **arguments: _open(root, "own", **arguments),
        {"train_domains": ("a", "b"), "eval_domains": (), "weights": (1.0, 1e10)},
        r"out of config\.data\.(?P<key>train_domains)",
        lambda _, match: {match["key"]: ("b",), "weights": ()},
        lambda root, _: _own(root),
    ),
}
SETS = ("a/set", "b/other")
FOLDERS: dict[str, Any] = {"layout": Layout(domain_from="folder"), "validation": 0.0}


def _as_prepare(root: Path, match: re.Match[str]) -> dict[str, Any]:
    assert "into another directory with" in match["command"]
    options = match["command"].partition(" with ")[2]
    command(f"seqjax prepare --source={root}/source --out=new --workers=1 {options}")
    return {"path": "new"}


def _own(root: Path, *, validation: float = 0.5) -> None:
    _lines(root, "s/a/1.jsonl", "s/b/1.jsonl")
    _prepare(root, "own", "s", **FOLDERS | {"validation": validation})


def _few_files(root: Path, patch: pytest.MonkeyPatch, *, hard: int) -> None:
    """Allow `hard` open files while the file "few" exists."""
    assert blocks.resource is not None
    write(root / "few", "")
    limits = blocks.resource.getrlimit
    patch.setattr(blocks.resource, "getrlimit", lambda which: (100, hard) if (root / "few").exists() else limits(which))
    patch.setattr(blocks.resource, "setrlimit", lambda which, limits: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of a domain and its blocks."""
    root = tmp_path_factory.mktemp("made")
    _lines(root, "source/train/c4/a.jsonl", "source/validation/c4/a.jsonl")
    lines = [line.replace("}", ', "meta": {"url": "https://a.org/x"}}') for line in (LINE % i for i in range(9))]
    write(root / "source/validation/c4/a.jsonl", "".join(lines))
    _prepare(root, "made")
    return root


@pytest.mark.parametrize("name", BLOCKS)
def test_prepared_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Path, name: str):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    shutil.copytree(made / "made", tmp_path / "corpus")
    follow(BLOCKS[name], tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------- the built-in corpus
def _few_texts(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Make the built-in corpus of a few documents."""
    texts = [
        extract.Document(domain, f"package{i}", "some words to train on " * 9)
        for domain in extract.DOMAINS
        for i in range(30)
    ]
    patch.setattr(extract, "distributions", dict)
    patch.setattr(extract, "documents", lambda dists: texts)
    write(root / "file", "")


def _builtin(root: Path, cache_dir: str = "cache", **arguments: Any) -> Any:
    seq_len = arguments.pop("seq_len", SEQ_LEN)
    config = DataConfig(corpus="builtin", tokenizer="byte", cache_dir=str(root / cache_dir), **arguments)
    corpus = open_corpus(config, seq_len=seq_len, vocab_size=264)
    corpus.train_sample(corpus.train_domains[0], count=1000)
    return corpus


def _cut_flat_file(root: Path, *, again: bool = False) -> None:
    """Read a flat file that was cut after the corpus was opened; open another corpus if it is there `again`."""
    corpus = _builtin(root)
    [path] = (root / "cache").glob("builtin-*/train-prose.uint16")
    path.write_bytes(b"short") if not again else None
    blocks.FlatBlocks(str(path), tokens=corpus.tokens["prose"], block=SEQ_LEN + 1)[0]


LONG = 10_000
BUILTIN: dict[str, Remedy] = {
    "a cache that is a file": Remedy(
        _builtin,
        {"cache_dir": "file"},
        r"config\.data\.(?P<key>cache_dir)",
        lambda _, match: {match["key"]: "writable"},
        _few_texts,
    ),
    "blocks that are too long": Remedy(
        _builtin,
        {"seq_len": LONG},
        r"lower config\.train\.(?P<key>seq_len)",
        lambda _, match: {match["key"]: SEQ_LEN},
        _few_texts,
    ),
    "training blocks that are too long": Remedy(
        _builtin,
        {"seq_len": 300, "train_domains": ("prose", "python"), "eval_domains": ("c_code",)},
        r"Domain '(?P<out>\w+)' .* out of config\.data\.(?P<key>train_domains)",
        lambda _, match: {match["key"]: tuple({"prose", "python"} - {match["out"]})},
        lambda root, patch: _few_texts_of(root, patch, "prose"),
    ),
    "evaluation blocks that are too long": Remedy(
        _builtin,
        {"seq_len": 1000, "eval_domains": ("prose", "c_code")},
        r"for evaluation .* lower config\.train\.(?P<key>seq_len)",
        lambda _, match: {match["key"]: SEQ_LEN},
        _few_texts,
    ),
    "evaluation blocks that are too long, other domains": Remedy(
        _builtin,
        {"seq_len": 1000, "eval_domains": ("prose", "c_code")},
        r"Domain '(?P<out>\w+)' .* for evaluation .* out of config\.data\.(?P<key>eval_domains)",
        lambda _, match: {match["key"]: tuple({"prose", "c_code"} - {match["out"]})},
        _few_texts,
    ),
    "a flat file that was cut": Remedy(
        _cut_flat_file,
        {},
        r"Delete (?P<path>\S+); the next run rebuilds it",
        lambda _, match: last(shutil.rmtree(match["path"]), {"again": True}),
        _few_texts,
    ),
}


def _few_texts_of(root: Path, patch: pytest.MonkeyPatch, domain: str) -> None:
    _few_texts(root, patch)
    texts = extract.documents({})
    patch.setattr(extract, "documents", lambda dists: [d for d in texts if d.domain != domain])


@pytest.mark.parametrize("name", BUILTIN)
def test_the_builtin_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    follow(BUILTIN[name], tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------- stores and streams
def _stored(root: Path, patch: pytest.MonkeyPatch, *, free: str = "") -> None:
    """Put the blocks in a store in memory; `free` is the directory with the only free space."""
    patch.setenv("XDG_CACHE_HOME", str(root / "small"))
    support.put(root / "corpus", f"memory://{root.name}/blocks")
    usage = shutil.disk_usage(root)
    if free:
        room = lambda path: usage._replace(free=10**9 if free in str(path) else 3000)  # noqa: E731
        patch.setattr(block_cache.shutil, "disk_usage", room)


def _remote(root: Path, cache_dir: str = "", **arguments: Any) -> None:
    _read(root, f"memory://{root.name}/blocks", cache_dir=str(root / cache_dir) if cache_dir else "", **arguments)


def _position(**changed: Any) -> pipeline.TrainIterator:
    settings = {"weights": {"c4": 1.0}, "batch_size": 2, "seed": 0} | changed
    source: Any = {"c4": [np.zeros(3, np.uint16).tobytes()] * 9}
    return pipeline.block_batches(
        source, **settings, workers=0, process_index=0, process_count=1, content="x", dtype=np.dtype("<u2")
    )


def _resume(root: Path, **changed: Any) -> None:
    _position(**changed).set_state(_position().get_state())


def _stream(root: Path, path: str = "source", **arguments: Any) -> Any:
    return _open(root, path, corpus="stream", **arguments)


def _first(root: Path, parts: int, domain: str = "c4") -> None:
    """Read the first block of the last of `parts` readers of a stream."""
    files = tuple(shard for shard in find_shards(str(root / "source")) if shard.split == "train")
    place = {"part": parts - 1, "parts": parts}
    reader = stream.Reader(
        files=files, domain=domain, tokenizer=ByteTokenizer(), block=9, seed=0, layout=Layout(), **place
    )
    next(iter(stream.DomainBlocks(reader)))


STREAMS: dict[str, Remedy] = {
    "a cache that cannot be written": Remedy(
        _remote,
        {"cache_dir": "file"},
        r"config\.data\.(?P<key>cache_dir) to a writable",
        lambda _, match: {match["key"]: "writable"},
        lambda root, patch: [_stored(root, patch), write(root / "file", "")],
    ),
    "a cache without space": Remedy(
        _remote,
        {},
        r"config\.data\.(?P<key>cache_dir) to a directory with enough space",
        lambda _, match: {match["key"]: "large"},
        lambda root, patch: _stored(root, patch, free="large"),
    ),
    "a resumed run with other settings": Remedy(
        _resume,
        {"batch_size": 4},
        r"batch_size: (?P<to>\d+) -> 4.*Restore the settings",
        lambda _, match: {"batch_size": int(match["to"])},
    ),
    "shards without a domain": Remedy(
        _first,
        {"parts": 1, "domain": "arxiv"},
        r"no document of 'arxiv' .* change config\.data\.train_domains",
        lambda _, match: {"domain": "c4"},
    ),
    "shards without a domain, another source": Remedy(
        _first,
        {"parts": 1, "domain": "arxiv"},
        r"no document of '(?P<domain>\w+)' .*; use a source that has it",
        lambda root, match: _lines(root, f"source/train/{match['domain']}/a.jsonl"),
    ),
    "fewer documents than workers": Remedy(
        _first,
        {"parts": 20},
        r"part 19 of 20.*lower config\.data\.(?P<key>workers)",
        lambda _, match: {"parts": 3},
    ),
    "no evaluation text": Remedy(
        _stream,
        {"path": "source/train"},
        r"set config\.data\.(?P<key>path) to a directory that holds train/ and validation/",
        lambda _, match: {match["key"]: "source"},
    ),
    "a long block of evaluation text": Remedy(
        _stream,
        {"seq_len": 600},
        r"lower config\.train\.(?P<key>seq_len)",
        lambda _, match: {match["key"]: 16},
        lambda root, _: _lines(root, "source/train/c4/b.jsonl"),
    ),
    "no evaluation text of a domain": Remedy(
        _stream,
        {"eval_domains": ("c4", "arxiv")},
        r"Domain '(?P<out>\w+)' .* out of config\.data\.(?P<key>eval_domains)",
        lambda _, match: {match["key"]: tuple({"c4", "arxiv"} - {match["out"]})},
    ),
    "no training text of a domain": Remedy(
        _stream,
        {"train_domains": ("c4", "arxiv")},
        r"domain '(?P<out>\w+)'; .* out of config\.data\.(?P<key>train_domains)",
        lambda _, match: {match["key"]: tuple({"c4", "arxiv"} - {match["out"]})},
    ),
    "no training text of a domain, another source": Remedy(
        _stream,
        {"train_domains": ("c4", "arxiv")},
        r"set config\.data\.(?P<key>path) to a source with more text",
        lambda _, match: {match["key"]: "more"},
        lambda root, _: [
            shutil.copytree(root / "source", root / "more"),
            _lines(root, "more/train/arxiv/a.jsonl"),
        ],
    ),
    "a path without text": Remedy(
        _stream,
        {"path": "surce"},
        "no file or directory (?P<path>\\S+); correct the path",
        lambda _, match: {"path": Path(match["path"]).name.replace("surce", "source")},
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_stores_and_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Path, name: str):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    shutil.copytree(made / "made", tmp_path / "corpus")
    follow(STREAMS[name], tmp_path, monkeypatch)
