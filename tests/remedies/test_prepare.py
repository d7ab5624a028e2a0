"""The remedies of `seqjax prepare`: its options, its source files, its output and its workers."""

import concurrent.futures
import dataclasses
import errno
import gzip
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from seqjax.data import sources
from seqjax.data.layout import Layout
from seqjax.data.prepare import __main__ as command
from seqjax.data.prepare import cluster, executors, lock, pack, run, tokenize
from seqjax.data.shards import find_shards
from seqjax.data.tokenizer import ByteTokenizer
from tests import extras
from tests.remedies.follow import Remedy, follow, last, write

LINE = '{"text": "hello world, hello world, hello world, number %d"}\n'


def _lines(root: Path, *paths: str, line: str = LINE, n: int = 9) -> None:
    for path in paths:
        write(root / path, "".join(line.replace("%d", str(i)) for i in range(n)))


def _prepare(root: Path, **options: Any) -> None:
    """Run the command; an option that is None is left out, and `True` is an option without a value."""
    arguments = {
        "source": "source",
        "out": "out",
        "tokenizer": "byte",
        "seq_len": 8,
        "workers": 1,
        "domain": "a",
    } | options
    arguments |= {name: root / arguments[name] for name in ("source", "out")}
    words = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in arguments.items() if value is not None
    ]
    command.main(words)


def _start(*lines: str, paths: tuple[str, ...] = ("source/a.jsonl",)) -> Callable[..., None]:
    """Return a `start` that writes lines, nine times each, to files."""
    return lambda root, patch: _lines(root, *paths, line="".join(lines))


def _drop(_: Path, match: re.Match[str]) -> dict[str, None]:
    return {match["drop"]: None}


def _to(_: Path, match: re.Match[str]) -> dict[str, str]:
    return {match["key"]: match["to"]}


def _another(_: Path, match: re.Match[str]) -> dict[str, str]:
    return {match["another"]: "another"}


ANOTHER = "another --(?P<another>out)"
BY_NAME = '{"body": "hello world, hello world, hello world, number %d", "kind": "news"}\n'
OPTIONS: dict[str, Remedy] = {
    "blocks of nothing": Remedy(_prepare, {"seq_len": 0}, r"--(?P<key>seq_len) must be at least (?P<to>\d)", _to),
    "fewer than no tokens": Remedy(_prepare, {"min_tokens": -1}, r"--(?P<key>min_tokens) .* at least (?P<to>\d)", _to),
    "more than all documents": Remedy(
        _prepare, {"validation": 1.5}, r"--(?P<key>validation) must be at least (?P<to>\d) and", _to
    ),
    "a source with its own validation": Remedy(
        _prepare,
        {"validation": 0.3},
        r"--(?P<drop>validation): .* leave the option out",
        _drop,
        _start(LINE, paths=("source/train/a.jsonl", "source/validation/a.jsonl")),
    ),
    "a document that cannot be divided": Remedy(
        _prepare,
        {"validation": 0.3},
        "Add documents",
        lambda root, _: _lines(root, "source/a.jsonl", n=90),
        lambda root, _: write(root / "source/a.jsonl", LINE),
    ),
    "a document that cannot be divided, not validated": Remedy(
        _prepare,
        {"validation": 0.3},
        r"or leave out --(?P<drop>validation)",
        _drop,
        lambda root, _: write(root / "source/a.jsonl", LINE),
    ),
    "documents that cannot be divided into long blocks": Remedy(
        _prepare,
        {"validation": 0.5, "seq_len": 400},
        r"lower --(?P<key>seq_len)",
        lambda _, match: {match["key"]: 16},
    ),
    "workers of a cluster": Remedy(
        lambda _, executor, workers: executors.require(executor, workers=workers or 0),
        {"executor": "dask:127.0.0.1:8786", "workers": 2},
        r"--(?P<drop>workers) is for this machine, .* leave it out",
        _drop,
    ),
    "an executor without an address": Remedy(
        lambda _, executor: executors.require(executor, workers=0),
        {"executor": "dask:"},
        r"or (?P<how>dask:)ADDRESS .* (?P<to>dask:\S+) for example",
        lambda _, match: {"executor": match["to"]},
    ),
    "a layout of another kind": Remedy(
        lambda _, **arguments: Layout(**arguments),
        {"domain_from": "file"},
        r"--(?P<key>domain_from)=file .* the word (?P<to>\w+)\.",
        _to,
    ),
    "an unknown domain": Remedy(
        _prepare,
        {"domain": None, "domains": "c5"},
        r"--(?P<key>domains): 'c5' .* Did you mean '(?P<to>\w+)'",
        _to,
        _start(LINE, paths=("source/c4/a.jsonl",)),
    ),
    "a domain that no document has": Remedy(
        _prepare,
        {"domain": None, "domain_from": "folder", "domains": "new"},
        r"--(?P<key>domains): \S+ has no document of new\..*Did you mean '(?P<to>\w+)'",
        _to,
        _start(LINE, paths=("source/news/a.jsonl",)),
    ),
    "a domain with capitals": Remedy(
        _prepare,
        {"domain": "news", "domains": "News"},
        r"--(?P<key>domains): 'News' .*'(?P<to>[a-z]+)'",
        _to,
    ),
    "text in another field": Remedy(
        _prepare,
        {},
        r"fields (?P<to>\w+).* give --(?P<key>text_field)=NAME",
        _to,
        _start(BY_NAME),
    ),
    "a field that is not text": Remedy(
        _prepare,
        {},
        r"name another field with --(?P<key>text_field)=NAME",
        lambda _, match: {match["key"]: "body"},
        _start('{"text": 3, "body": "hello world, hello world"}\n'),
    ),
    "a field that is not text, converted": Remedy(
        _prepare,
        {},
        "Convert (?P<key>text) to strings",
        lambda root, match: _lines(root, "source/a.jsonl", line=LINE.replace("text", match["key"])),
        _start('{"text": 3}\n'),
    ),
    **{
        f"text without a domain, {name}": Remedy(
            _prepare,
            {"domain": None, "text_field": "body"},
            advice,
            change,
            _start(BY_NAME, paths=("source/folder/a.jsonl",)),
        )
        for name, advice, change in (
            ("one", r"--(?P<key>domain)=NAME", lambda _, match: {match["key"]: "news"}),
            ("a field", r"--(?P<key>domain_field)=FIELD", lambda _, match: {match["key"]: "kind"}),
            ("folders", r"--(?P<key>domain_from)=(?P<to>folder)", _to),
        )
    },
    "no folders": Remedy(
        _prepare,
        {"domain": None, "domain_from": "folder"},
        r"give --(?P<key>domain)=NAME",
        lambda _, match: {"domain_from": None, match["key"]: "news"},
    ),
    "another domain field": Remedy(
        _prepare,
        {"domain": None, "domain_field": "sort", "text_field": "body"},
        r"Give another --(?P<key>domain_field)",
        lambda _, match: {match["key"]: "kind"},
        _start(BY_NAME),
    ),
    "another domain field, one domain": Remedy(
        _prepare,
        {"domain": None, "domain_field": "sort", "text_field": "body"},
        r"or --(?P<key>domain)=NAME",
        lambda _, match: {"domain_field": None, match["key"]: "news"},
        _start(BY_NAME),
    ),
    "less than a block": Remedy(
        _prepare,
        {"seq_len": 9000},
        r"(?P<n>\d+) tokens together .* a smaller --(?P<key>seq_len)",
        lambda _, match: {match["key"]: int(match["n"]) // 2},
    ),
    "less than a block, more text": Remedy(
        _prepare, {"seq_len": 900}, "Give more text", lambda root, _: _lines(root, "source/b.jsonl", n=90)
    ),
    "more domains than files": Remedy(
        _prepare,
        {"domain": None, "domain_field": "kind", "text_field": "body"},
        r"or --(?P<key>domain)=NAME",
        lambda _, match: {"domain_field": None, match["key"]: "news"},
        lambda root, patch: [
            _lines(root, "source/a.jsonl", line=BY_NAME.replace("news", "news%d")),
            patch.setattr(tokenize, "MAX_DOMAINS", 3),
        ],
    ),
    "more domains than files, a field": Remedy(
        _prepare,
        {"domain": None, "domain_field": "body", "text_field": "body"},
        r"give a --(?P<key>domain_field) .* with fewer names",
        lambda _, match: {match["key"]: "kind"},
        lambda root, patch: [_start(BY_NAME)(root, patch), patch.setattr(tokenize, "MAX_DOMAINS", 3)],
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    _lines(tmp_path, "source/a.jsonl") if OPTIONS[name].start is Remedy.start else None
    monkeypatch.setattr(cluster, "require", lambda: None)
    follow(OPTIONS[name], tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------------------- sources
def _small(ending: str, content: bytes) -> Callable[..., None]:
    """Return a `start` that writes a file; a document and an unpacked file have at most 999 and 5,000 bytes."""

    def start(root: Path, patch: pytest.MonkeyPatch) -> None:
        _lines(root, "source/a.jsonl")
        (root / "source" / f"b{ending}").write_bytes(content)
        patch.setattr(sources, "MOST_TEXT", 999)
        patch.setattr(sources, "MOST_UNPACKED", 5000)
        patch.setattr(sources, "CHUNK", 100)

    return start


def _unpack(root: Path, match: re.Match[str]) -> None:
    path = Path(match["path"])
    path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()


def _changed(root: Path) -> None:
    """Read the time of a shard that was moved after it was listed."""
    [shard] = find_shards(str(root / "source"), layout=Layout(domain="a"))
    (root / "source" / "a.jsonl").rename(root / "moved") if not (root / "moved").exists() else None
    shard.changed()


LONG = json.dumps({"text": "long words " * 100}).encode() + b"\n"
MANY = gzip.compress(b"".join(LINE.encode() for _ in range(200)))
SOURCES: dict[str, Remedy] = {
    "a line that is too long": Remedy(
        _prepare,
        {},
        r"(?P<path>\S+): line (?P<line>\d+) is longer .*; split or remove it",
        lambda root, _: (root / "source" / "b.jsonl").write_text(LINE),
        _small(".jsonl", LINE.encode() + LONG.rstrip()),
    ),
    "a record that is too long": Remedy(
        _prepare,
        {},
        r"(?P<path>\S+): record (?P<line>\d+) is longer .*; split or remove it",
        lambda root, match: _without(root / "source" / match["path"], int(match["line"])),
        lambda root, patch: [
            _small(".jsonl", LINE.encode() + LONG)(root, patch),
            patch.setattr(sources, "CHUNK", 1 << 18),
        ],
    ),
    "a document that is too long": Remedy(
        _prepare,
        {},
        r"(?P<path>\S+) is longer .*; split or remove it",
        lambda root, _: (
            [write(root / "source" / f"b{i}.txt", "long words " * 50) for i in range(2)]
            + [(root / "source" / "b.txt").unlink()]
        ),
        _small(".txt", b"long words " * 100),
    ),
    "a file that unpacks to too much": Remedy(
        _prepare,
        {},
        r"file://(?P<path>\S+) unpacks to .*; remove it",
        lambda _, match: Path(match["path"]).unlink(),
        _small(".jsonl.gz", MANY),
    ),
    "a file that unpacks to too much, unpacked": Remedy(
        _prepare,
        {},
        r"file://(?P<path>\S+) unpacks to .* store it without compression",
        _unpack,
        _small(".jsonl.gz", MANY),
    ),
    "a shard that was moved": Remedy(
        _changed,
        {},
        r"file://(?P<path>\S+) was moved or deleted; put back a copy",
        lambda root, match: shutil.copy(root / "moved", match["path"]),
        _start(LINE),
    ),
    "a pipe": Remedy(
        _prepare,
        {"source": "source"},
        r"(?P<path>\S+) is not a file that can be read; give the directory or (?P<how>glob)",
        lambda root, _: {"source": "source/*.jsonl.gz"},
        lambda root, _: [
            (root / "source").mkdir(),
            (root / "source" / "a.jsonl.gz").write_bytes(gzip.compress((LINE * 9).encode())),
            os.mkfifo(root / "source" / "b.jsonl"),
        ],
    ),
    "a link to nothing": Remedy(
        _prepare,
        {},
        r"(?P<path>\S+) is a link to a missing file; repair",
        lambda root, match: write(Path(match["path"]).resolve(), LINE * 9),
        lambda root, _: [_lines(root, "source/a.jsonl"), (root / "source/b.jsonl").symlink_to(root / "none.jsonl")],
    ),
    "no files of a known kind": Remedy(
        _prepare,
        {"source": "other"},
        r"other holds no .*; give the (?P<to>directory) or glob of the shards",
        lambda _, match: {"source": "source"},
        lambda root, _: [write(root / "other" / "a.csv", "x"), _lines(root, "source/a.jsonl")],
    ),
    **{
        f"text files without a domain, {key}": Remedy(
            _prepare,
            {"domain": None},
            rf"Files in \.txt need .*--(?P<key>{key})=(?P<to>\w+)",
            _to if key == "domain_from" else lambda _, match: {match["key"]: "news"},
            lambda root, _: write(root / "source" / "folder" / "a.txt", "hello world, hello world"),
        )
        for key in ("domain", "domain_from")
    },
    "a bad line after a run without --strict": Remedy(
        lambda root, **arguments: _unfinished(root, **arguments),
        {},
        rf"(?P<file>[\w.]+):(?P<line>\d+): .*Fix the file and give {ANOTHER}",
        lambda root, match: last(_without(root / "source" / match["file"], int(match["line"])), _another(root, match)),
        lambda root, _: write(root / "source/a.jsonl", '{"text": 3}\n' + LINE * 9),
    ),
    "a bad line with --strict": Remedy(
        lambda root, **arguments: _prepare(root, **arguments),
        {"strict": True},
        rf"(?P<file>[\w.]+):(?P<line>\d+): .*Fix the file and give {ANOTHER}",
        lambda root, match: last(_without(root / "source" / match["file"], int(match["line"])), _another(root, match)),
        lambda root, _: write(root / "source/a.jsonl", '{"text": 3}\n' + LINE * 9),
    ),
}


def _unfinished(root: Path, out: str = "out", **arguments: Any) -> None:
    """Prepare with --strict in a directory where a run without it was stopped before it wrote blocks."""
    if out == "out":
        with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
            patch.setattr(run, "portions", _interrupt)
            _prepare(root, out=out, **arguments)
    _prepare(root, out=out, strict=True, **arguments)


def _interrupt(*_: Any, **__: Any) -> Any:
    raise InterruptedError


def _without(path: Path, line: int) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text for i, text in enumerate(lines, start=1) if i != line))


@pytest.mark.parametrize("name", SOURCES)
def test_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    follow(SOURCES[name], tmp_path, monkeypatch)


# -------------------------------------------------------------------------------------------------------------- output
def _full(module: Any, name: str) -> Callable[..., None]:
    """Return a `start` with a function that cannot write while the file "big" fills the disk."""

    def start(root: Path, patch: pytest.MonkeyPatch) -> None:
        _lines(root, "source/a.jsonl")
        write(root / "big", "")
        function = getattr(module, name)

        def full(*arguments: Any, **options: Any) -> Any:
            if (root / "big").exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **options)

        patch.setattr(module, name, full)

    return start


def _free(root: Path, _: re.Match[str]) -> None:
    (root / "big").unlink()


def _begun(root: Path, patch: pytest.MonkeyPatch) -> None:
    del patch
    _lines(root, "source/a.jsonl")
    _prepare(root)


def _new_text(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Change the text of a finished preparation; the file "copy" keeps it."""
    _begun(root, patch)
    path = root / "source" / "a.jsonl"
    shutil.copy2(path, root / "copy")
    path.write_text(path.read_text().replace("hello", "hallo"))


def _little_space(root: Path, patch: pytest.MonkeyPatch) -> None:
    _lines(root, "source/a.jsonl")
    write(root / "big", "")
    usage = shutil.disk_usage
    patch.setattr(
        run.shutil,
        "disk_usage",
        lambda path: usage(path)._replace(free=9) if (root / "big").exists() else usage(path),
    )


def _cut_once(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Cut the tokens of a shard between the two steps of a preparation, once."""
    _lines(root, "source/a.jsonl")
    plan = pack.plan_files

    def cut(out: Path, *arguments: Any, **options: Any) -> Any:
        planned = plan(out, *arguments, **options)
        [path] = (out / ".parts").glob("*.bin")
        path.write_bytes(b"") if not (root / "cut").exists() else None
        write(root / "cut", "")
        return planned

    patch.setattr(run, "plan_files", cut)


def _change_once(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Change the time of a shard while it is read, once."""
    _lines(root, "source/a.jsonl")
    documents = tokenize.shards.documents

    def changing(shard: Any, *arguments: Any, **options: Any) -> Any:
        yield from documents(shard, *arguments, **options)
        os.utime(root / "source/a.jsonl", (1, 1)) if not (root / "changed").exists() else None
        write(root / "changed", "")

    patch.setattr(tokenize.shards, "documents", changing)


def _one_holder(root: Path, out: str = "out") -> None:
    """Prepare while another preparation holds the lock of "out", until the file "waited" is there."""
    if (root / "waited").exists():
        _prepare(root, out=out)
        return
    with lock.locked(root / "out"):
        _prepare(root, out=out)


SAME = "run the same command"
OUTPUT: dict[str, Remedy] = {
    "a full disk for tokens": Remedy(
        _prepare,
        {},
        "disk is full.*free some disk space .* run the same command again",
        _free,
        _full(tokenize, "replacing"),
    ),
    "a full disk for waiting tokens": Remedy(
        _prepare,
        {},
        "disk is full.*free some disk space",
        _free,
        lambda root, patch: [
            patch.setattr(tokenize, "HELD_TOKENS", 1),
            _full(tokenize.tempfile, "TemporaryFile")(root, patch),
        ],
    ),
    "a full disk for blocks": Remedy(
        _prepare, {}, "disk is full.*free some disk space", _free, _full(pack.blocks, "write_records")
    ),
    "little space for blocks": Remedy(_prepare, {}, f"free some disk space and {SAME} again", _free, _little_space),
    "a directory below a file": Remedy(
        _prepare,
        {"out": "source/a.jsonl/out"},
        f"Cannot write to .*; give {ANOTHER}",
        _another,
        _start(LINE),
    ),
    "a directory of other files": Remedy(
        _prepare,
        {"out": "source"},
        f"is not empty.*; give {ANOTHER}",
        _another,
        _start(LINE),
    ),
    "parts of another program": Remedy(
        _prepare,
        {},
        f"files that no preparation wrote.*; give {ANOTHER}",
        _another,
        lambda root, _: [_lines(root, "source/a.jsonl"), write(root / "out" / ".parts" / "mine", "x")],
    ),
    "parts that are a file": Remedy(
        _prepare,
        {},
        f"Cannot write to .*; give {ANOTHER}",
        _another,
        lambda root, _: [_lines(root, "source/a.jsonl"), write(root / "out" / ".parts", "x")],
    ),
    "other settings": Remedy(
        _prepare,
        {"seq_len": 16},
        r"block (?P<old>\d+) -> 17.* Give them again",
        lambda _, match: {"seq_len": int(match["old"]) - 1},
        _begun,
    ),
    "tokens that were cut": Remedy(_prepare, {}, f"000000.bin, .*; {SAME} again", lambda *_: None, _cut_once),
    "text that changes while it is read": Remedy(
        _prepare, {}, f"was changed while it was read; {SAME} again", lambda *_: None, _change_once
    ),
    "text that changed": Remedy(
        _prepare,
        {},
        r"file://(?P<path>\S+) has changed.*Restore the text",
        lambda root, match: shutil.copy2(root / "copy", match["path"]),
        _new_text,
    ),
    "text that changed, prepared again": Remedy(
        _prepare, {}, r"or delete (?P<path>\S+) or", lambda _, match: shutil.rmtree(match["path"]), _new_text
    ),
    "text that changed, elsewhere": Remedy(_prepare, {}, f"or give {ANOTHER}", _another, _new_text),
    "another preparation": Remedy(
        _one_holder, {}, f"Wait until it has ended and {SAME}", lambda root, _: write(root / "waited", ""), _start(LINE)
    ),
    "another preparation, elsewhere": Remedy(_one_holder, {}, f"or give {ANOTHER}", _another, _start(LINE)),
}


@pytest.mark.parametrize("name", OUTPUT)
def test_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(run, "CLOCK_SECONDS", -1.0)  # text of this second counts as changed later
    follow(OUTPUT[name], tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------------------- workers
class _Pool(concurrent.futures.Executor):
    """A pool with memory for a single process."""

    def __init__(self, max_workers: int, *_: Any):
        self._fits = max_workers == 1

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(fn(*arguments, **options)) if self._fits else future.set_exception(BrokenProcessPool())
        return future


def test_killed_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executors.concurrent.futures, "ProcessPoolExecutor", _Pool)
    remedy = Remedy(
        _prepare,
        {"workers": 4},
        r"run the same command again with fewer --(?P<key>workers)",
        lambda _, match: {match["key"]: 1},
        _start(LINE, paths=("source/a.jsonl", "source/b.jsonl")),
    )
    follow(remedy, tmp_path, monkeypatch)


def _work(root: Path, **changed: Any) -> None:
    """Do a job as a worker whose requirements have `changed`."""
    shards = find_shards(str(root / "source"), layout=Layout(domain="a"))
    (root / "out" / ".parts").mkdir(parents=True, exist_ok=True)
    marker = root / "out" / ".parts" / "marker.json"
    cluster.write_marker(
        marker, cluster.Needs(marker.parent, shards, "byte", tokenizer_path="", tokenizer_sha256=ByteTokenizer.hash)
    )
    path = changed.pop("marker", None)
    marker.write_text(json.dumps(json.loads(marker.read_text()) | changed))
    cluster.run_job(None, function=lambda job: None, marker=str(path or marker))


WORKERS: dict[str, Remedy] = {
    "storage that is not shared": Remedy(
        _work,
        {"marker": "/nowhere/out/.parts/marker.json"},
        "give an --out on storage that all workers share",
        lambda *_: {"marker": None},
    ),
    "another version": Remedy(
        _work,
        {"versions": {"seqjax": "9.9"}},
        r"has seqjax (?P<to>\S+) \(here 9.9\): install the same versions",
        lambda _, match: {"versions": {"seqjax": match["to"]}},
    ),
    "a source that is not shared": Remedy(
        _work,
        {"sources": [["file:///nowhere/a.jsonl", 5]]},
        "give a --source that all workers share",
        lambda root, _: {"sources": [[f"file://{root}/source/a.jsonl", (root / "source/a.jsonl").stat().st_size]]},
    ),
    "a tokenizer that is not shared": Remedy(
        _work,
        {"tokenizer": "mixtral", "tokenizer_path": "/nowhere/x.model"},
        r"cannot load the tokenizer: config\.data\.tokenizer_path: no file",
        lambda *_: {"tokenizer": "byte", "tokenizer_path": ""},
    ),
}


@extras.mark("distributed")
@pytest.mark.parametrize("name", WORKERS)
def test_workers_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(cluster, "_checked", set())
    _lines(tmp_path, "source/a.jsonl")
    follow(WORKERS[name], tmp_path, monkeypatch)


# ------------------------------------------------------------------------------------------------------------- cluster
@pytest.fixture(scope="module")
def scheduler() -> Iterator[Any]:
    """A scheduler and a worker of one thread in this process."""
    distributed = extras.package("distributed")
    own = {"host": "127.0.0.1", "protocol": "tcp://", "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=False, **own) as cluster:
        yield cluster


def _once(root: Path, patch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    """Let a function raise `error` at its first call."""
    function = getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        if (root / "called").exists():
            return function(*arguments, **options)
        write(root / "called", "")
        raise error

    patch.setattr(owner, name, called)


def _killed(*_: Any) -> Exception:
    from distributed import KilledWorker

    return KilledWorker("job", None, 3)


def _lose_a_job(root: Path, patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the first job fail with `error`, as if its workers or its scheduler were lost."""
    from distributed import Future

    _once(root, patch, tokenize, "_tokenize", RuntimeError("lost"))
    result = Future.result

    def lost(future: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return result(future, *arguments, **options)
        except RuntimeError:
            raise error from None

    patch.setattr(Future, "result", lost)


def _versions(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this machine have another distributed than the scheduler, until the file "installed" is there."""
    installed = cluster.installed
    patch.setattr(
        cluster,
        "installed",
        lambda name: "0.1" if name == "distributed" and not (root / "installed").exists() else installed(name),
    )


def _other_versions(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this machine have another seqjax than the workers, until the file "installed" is there."""
    write_marker = cluster.write_marker

    def marked(path: Path, needs: Any) -> None:
        write_marker(path, needs)
        if not (root / "installed").exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"versions": {"seqjax": "9.9"}}))

    patch.setattr(cluster, "write_marker", marked)


def _hidden(root: Path, patch: pytest.MonkeyPatch) -> None:
    """Let workers write their files elsewhere, for the directory "out"."""
    patch.setattr(cluster, "VISIBLE_SECONDS", 0.1)
    tokenize_shard = run.tokenize_shard

    def elsewhere(job: Any) -> None:
        tokenize_shard(job)
        if "/out/" in str(job.done):
            job.done.unlink()

    patch.setattr(run, "tokenize_shard", elsewhere)
    patch.setattr(cluster.DaskCluster, "run", lambda *arguments: _run_here(*arguments))


def _run_here(pool: Any, function: Callable[[Any], None], jobs: Any, display: Any) -> None:
    del pool, display
    for job in jobs:
        function(job)
    cluster._wait_for([job.done for job in jobs])


CLUSTER: dict[str, Remedy] = {
    "an address without a port": Remedy(
        _prepare, {"executor": "dask:localhost"}, "give (?P<how>dask:)HOST:PORT", lambda *_: {"executor": "ADDRESS"}
    ),
    "an address where nothing answers": Remedy(
        _prepare,
        {"executor": "dask:127.0.0.1:1"},
        "Start one with `dask scheduler` and give the address",
        lambda *_: {"executor": "ADDRESS"},
    ),
    "the address of a worker": Remedy(
        _prepare,
        {"executor": "WORKER"},
        "is a worker; give the scheduler's address",
        lambda *_: {"executor": "ADDRESS"},
    ),
    "a scheduler of another version": Remedy(
        _prepare,
        {"executor": "ADDRESS"},
        r"has distributed \S+, this machine has 0.1: install the same version",
        lambda root, _: write(root / "installed", ""),
        _versions,
    ),
    "a worker of another version": Remedy(
        _prepare,
        {"executor": "ADDRESS"},
        r"1 of 1 workers .* \(here 9.9\): install the same versions",
        lambda root, _: write(root / "installed", ""),
        _other_versions,
    ),
    "a cluster that stops": Remedy(
        _prepare,
        {"executor": "ADDRESS"},
        f"stopped answering.*Start it again and {SAME}",
        lambda *_: None,
        lambda root, patch: _once(root, patch, cluster, "_require_workers", OSError("closed")),
    ),
    "workers that die": Remedy(
        _prepare,
        {"executor": "ADDRESS"},
        f"4 workers died.*Give them more memory and {SAME} again",
        lambda *_: None,
        lambda root, patch: _lose_a_job(root, patch, _killed()),
    ),
    "a scheduler that is lost": Remedy(
        _prepare,
        {"executor": "ADDRESS"},
        f"connection to the scheduler was lost.*Start the cluster again and {SAME}",
        lambda *_: None,
        lambda root, patch: _lose_a_job(root, patch, concurrent.futures.CancelledError()),
    ),
    "files that are not visible here": Remedy(
        _prepare,
        {"executor": "ADDRESS"},
        "give an --(?P<another>out) that all workers and this machine share",
        _another,
        _hidden,
    ),
}


@extras.mark("distributed")
@pytest.mark.parametrize("name", CLUSTER)
def test_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: Any, name: str):
    addresses = {
        "ADDRESS": f"dask:{scheduler.scheduler_address}",
        "WORKER": f"dask:{next(iter(scheduler.scheduler_info['workers']))}",
    }
    remedy = CLUSTER[name]
    monkeypatch.setattr(cluster, "_checked", set())
    _lines(tmp_path, "source/a.jsonl")

    def attempt(root: Path, executor: str, **options: Any) -> None:
        monkeypatch.setattr(cluster, "CONNECT_SECONDS", 20.0 if executor in addresses else 0.2)
        remedy.attempt(root, executor=addresses.get(executor, executor), workers=0, **options)

    follow(dataclasses.replace(remedy, attempt=attempt), tmp_path, monkeypatch)


@extras.mark("distributed")
def test_a_cluster_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    distributed = extras.package("distributed")
    monkeypatch.setattr(cluster, "START_SECONDS", 0.2)
    _lines(tmp_path, "source/a.jsonl")
    own = {"host": "127.0.0.1", "protocol": "tcp://", "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(n_workers=0, threads_per_worker=1, processes=False, **own) as empty:
        remedy = Remedy(
            _prepare,
            {"executor": f"dask:{empty.scheduler_address}", "workers": 0},
            rf"start some with `dask worker {re.escape(empty.scheduler_address)} --nthreads=(?P<threads>1)`",
            lambda _, match: [monkeypatch.setattr(cluster, "START_SECONDS", 60.0), empty.scale(int(match["threads"]))],
        )
        monkeypatch.setattr(cluster, "_checked", set())
        follow(remedy, tmp_path, monkeypatch)
