"""Errors of a preparation: source, settings, disk, changed output and lock."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqjax.config import DataConfig, from_config_dict, presets
from seqjax.data import blocks, open_corpus, slimpajama, stored_tokenizer
from seqjax.data.layout import Layout
from seqjax.data.prepare import executors, lock, results, run
from seqjax.data.prepare.__main__ import main
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError

from .conftest import contents, prepared, row, some_text, write_corpus, write_shard

BYTE = ByteTokenizer()


LIMITED = """
import resource, signal, sys
from seqjax.data import prepare
from seqjax.errors import UserError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in sys.argv[3:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    try:
        prepare.prepare(sys.argv[1], f"{sys.argv[2]}/{limit}", tokenizer="byte", seq_len=16, workers=1)
    except UserError as error:
        print(error)
"""


@pytest.fixture
def bad_source(tmp_path: Path) -> Path:
    """One shard with one line per fault between good lines, and a torn shard."""
    rng = np.random.default_rng(0)
    good = [row("c4", some_text(rng, 30)) for _ in range(6)]
    bad = [b"{not json\n", b'{"text": "\xff"}\n', row("c4", " "), row("RedPajamaX", "x"), b'{"meta": {}}\n']
    mixed = [line for pair in zip(good, bad) for line in pair] + good[5:]
    write_shard(tmp_path / "source" / "a.jsonl.zst", mixed)
    torn = write_shard(tmp_path / "source" / "b.jsonl.zst", [row("c4", f"{i} {some_text(rng, 50)}") for i in range(90)])
    torn.write_bytes(torn.read_bytes()[:-40])
    return tmp_path / "source"


def test_bad_lines_are_counted_and_listed(bad_source: Path, tmp_path: Path):
    manifest = prepared(bad_source, tmp_path / "out")
    skipped = manifest["skipped"]
    assert skipped["by_reason"] == {
        "empty document": 1,
        "no text": 1,
        "not JSON": 1,
        "not UTF-8": 1,
        "torn shard": 1,
        "unknown set name": 1,
    }
    assert skipped["count"] == 6
    named = [(line["file"], line["line"], line["reason"]) for line in skipped["first"]]
    assert named[:2] == [("a.jsonl.zst", 2, "not JSON"), ("a.jsonl.zst", 4, "not UTF-8")]
    assert named[-1][0] == "b.jsonl.zst"
    assert "ends in the middle" in named[-1][2]
    assert manifest["splits"]["train"]["c4"]["documents"] >= 6
    assert "6 lines skipped" in results.summary(manifest)
    assert "a.jsonl.zst:2: not JSON" in results.summary(manifest)


# test_parallel_errors_raise_the_first_in_job_order also covers errors of a worker process.
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_strict_stops_at_the_first_bad_line(bad_source: Path, tmp_path: Path, workers: int):
    with pytest.raises(UserError, match=r"a\.jsonl\.zst:2: not JSON.*--strict"):
        prepared(bad_source, tmp_path / "out", strict=True, workers=workers)


def fail_after(seconds: float) -> None:
    time.sleep(seconds)
    raise UserError(f"after {seconds} seconds")


@pytest.mark.parametrize("name", ["workers", "min_tokens", "max_tokens"])
def test_negative_options_are_refused(corpus_dir: Path, tmp_path: Path, name: str):
    with pytest.raises(UserError, match=f"--{name} .*-5"):
        prepared(corpus_dir, tmp_path / "out", **{name: -5})
    assert not (tmp_path / "out").exists()


def test_empty_compressed_file_is_torn(tmp_path: Path):
    """A valid compressed file without lines still contains a frame."""
    write_shard(tmp_path / "source" / "a.jsonl.zst", [row("c4", "some text of this domain")])
    write_shard(tmp_path / "source" / "b.jsonl.zst", [])
    for name in ("c.jsonl.zst", "d.json.gz"):
        (tmp_path / "source" / name).touch()
    skipped = prepared(tmp_path / "source", tmp_path / "out")["skipped"]
    assert [(line["file"], line["reason"]) for line in skipped["first"]] == [
        ("c.jsonl.zst", "torn shard: zstd data of 0 bytes; the lines before it were kept"),
        ("d.json.gz", "torn shard: gzip data of 0 bytes; the lines before it were kept"),
    ]


@pytest.mark.slow
def test_many_bad_lines_are_all_counted(tmp_path: Path):
    """Over 100,000 lines per fault, a different number for each, between good lines."""
    bad = {
        "not JSON": [b"{not json\n", b"[" * 2000 + b"\n"],
        "empty line": [b"\n"],
        "not UTF-8": [b'{"text": "\xff"}\n', row("c4", "").replace(b'""', b'"\\ud800"')],
        "not a JSON object": [b"3\n", b"[1]\n"],
        "no text": [b'{"meta": {}}\n'],
        "text is an integer, not text": [row("c4", "").replace(b'""', b"3")],
        "empty document": [row("c4", " \t"), row("arxiv", "")],
        "unknown set name": [row("RedPajamaX", "x"), row("c4", "x").replace(b'"RedPajamaC4"', b"7")],
        "no meta.redpajama_set_name": [b'{"text": "a", "meta": {}}\n', b'{"text": "a"}\n'],
    }
    kinds = [line for lines in bad.values() for line in lines]
    good = row("c4", "some text of this domain")
    counts = 100_000 + np.arange(len(kinds))
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(len(kinds)), counts))
    for index, lines in enumerate(np.array_split(order, 3)):
        content = [line for number, kind in enumerate(lines) for line in (kinds[kind], *([good] * (number % 10 == 0)))]
        write_shard(tmp_path / "source" / f"{index}.jsonl.zst", content)
    manifest = prepared(tmp_path / "source", tmp_path / "out")
    expected, first = {}, 0
    for reason, lines in bad.items():
        expected[reason] = int(counts[first : first + len(lines)].sum())
        first += len(lines)
    assert manifest["skipped"]["by_reason"] == dict(sorted(expected.items()))
    assert manifest["skipped"]["count"] == counts.sum()
    assert manifest["splits"]["train"]["c4"]["documents"] == sum(
        -(-len(part) // 10) for part in np.array_split(order, 3)
    )


def test_parallel_errors_raise_the_first_in_job_order():
    with pytest.raises(UserError, match=r"after 1\.0 seconds"):
        run._run(executors.LocalProcesses(2), fail_after, [1.0, 0.0], title="fail", total=2)


def test_strict_refuses_lines_skipped_earlier(bad_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "plan_files", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepared(bad_source, tmp_path / "out")
    with pytest.raises(UserError, match=r"a\.jsonl\.zst:2: not JSON"):
        prepared(bad_source, tmp_path / "out", strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 8}, "block 17 -> 9"),
        ({"domains": ["c4"]}, "domains"),
        ({"min_tokens": 3}, "min_tokens 0 -> 3"),
        ({"source": "other"}, r"1 source files .*new\.jsonl\.zst"),
    ],
)
def test_changed_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str):
    source = write_corpus(tmp_path / "source", documents=3, shards=1)
    prepared(source, tmp_path / "out")
    if change.pop("source", None):
        write_shard(source / "train" / "new.jsonl.zst", [row("c4", "more")])
    with pytest.raises(UserError, match=message):
        prepared(source, tmp_path / "out", **change)


EVERY_OPTION: list[tuple[dict[str, Any], str]] = [
    ({"seq_len": 8}, "block"),
    ({"domains": ["c4"]}, "domains"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"max_tokens": 30}, "max_tokens"),
    ({"validation": 0.4}, "validation"),
    ({"layout": Layout(domain="other")}, "layout"),
    ({"layout": Layout(text_field="body")}, "layout"),
]


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "finished"])
def test_resume_refuses_added_and_removed_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool):
    """A stopped or finished preparation accepts only its own options."""
    texts = [f"some text {i}" for i in range(40)]
    lines = [json.dumps({"text": text, "body": text}).encode() + b"\n" for text in texts]
    source = tmp_path / "source"
    write_shard(source / "c4" / "a.jsonl.zst", lines)

    def begin(out: Path, **options: Any) -> None:
        with monkeypatch.context() as patch:
            if stopped:
                patch.setattr(run, "plan_files", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt) if stopped else contextlib.nullcontext():
                prepared(source, out, **options)

    def files(out: Path) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}

    begin(tmp_path / "plain")
    for i, (options, name) in enumerate(EVERY_OPTION):
        begin(tmp_path / f"{i}", **options)
        before = files(tmp_path)
        for out, changed_options in ((tmp_path / "plain", options), (tmp_path / f"{i}", {})):
            with pytest.raises(UserError, match=rf"other settings: .*\b{name}\b"):
                prepared(source, out, **changed_options)
        assert files(tmp_path) == before
        prepared(source, tmp_path / f"{i}", **options)  # the original options still work


def test_changed_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_corpus(tmp_path / "source", documents=3, shards=1)
    prepared(source, tmp_path / "out")
    monkeypatch.setattr(ByteTokenizer, "hash", "f" * 64)
    with pytest.raises(UserError, match=r"tokenizer byte .* -> byte \(ffffffffffff\)"):
        prepared(source, tmp_path / "out")


def test_nonempty_output_directory_is_refused(corpus_dir: Path, tmp_path: Path):
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="not empty"):
        prepared(corpus_dir, tmp_path)
    with pytest.raises(UserError, match=r"--domains: 'arxive' .*'arxiv'"):
        prepared(corpus_dir, tmp_path / "out", domains=["arxive"])


@pytest.mark.parametrize("name", ["mine.txt", "000000.txt", "sub/000000.json", ".mine.tmp"])
def test_foreign_files_in_parts_are_not_deleted(corpus_dir: Path, tmp_path: Path, name: str):
    path = tmp_path / "out" / ".parts" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(UserError, match=r"\.parts has files"):
        prepared(corpus_dir, tmp_path / "out")
    assert path.read_text() == "mine"
    prepared(corpus_dir, tmp_path / "other")
    path = tmp_path / "other" / ".parts" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    prepared(corpus_dir, tmp_path / "other")
    assert path.read_text() == "mine"


def test_linked_parts_directory_is_refused(corpus_dir: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "settings.txt").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".parts").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"\.parts .*link"):
        prepared(corpus_dir, tmp_path / "out")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["settings.txt"]


def test_full_disk_is_resumable(tmp_path: Path):
    """A file size limit replaces a full disk; it stops a part or a block file."""
    limits = ("20000", "60000")
    source = write_corpus(tmp_path / "source", documents=100, shards=2)
    write_shard(source / "train" / "a_small.jsonl.zst", [row("c4", "small")])
    arguments = [sys.executable, "-c", LIMITED, str(source), str(tmp_path), *limits]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    messages = result.stdout.splitlines()
    assert len(messages) == 2, result.stderr
    prepared(source, tmp_path / "unlimited")
    for line, limit in zip(messages, limits, strict=True):
        assert "Cannot write" in line
        assert f"/{limit}/" in line
        assert "same command" in line
        assert (tmp_path / limit / ".parts" / "000000.json").is_file()
        prepared(source, tmp_path / limit)
        assert contents(tmp_path / limit) == contents(tmp_path / "unlimited")


@pytest.mark.parametrize("message", ["No space left on device", "File too large", "another error"])
def test_full_disk_at_close_raises_oserror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str):
    """array_record raises a RuntimeError when it closes the file."""

    class Full:
        def __init__(self, *arguments: str):
            pass

        def write(self, record: bytes) -> None:
            pass

        def close(self) -> None:
            raise RuntimeError(f"write() failed: {message}; writing x; at byte 3")

    monkeypatch.setattr(blocks.array_record_module, "ArrayRecordWriter", Full)
    with pytest.raises(RuntimeError if message == "another error" else OSError, match=message):
        blocks.write_records(tmp_path / "x.array_record", iter([np.zeros((2, 5), np.uint16)]))


def test_missing_disk_space_is_reported(corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(UserError, match=r"need 0\.0 GB in .*/out\b"):
        prepared(corpus_dir, tmp_path / "out")


def trains(out: Path) -> bool:
    """Return whether `prepare` prints a training command; read the blocks as it would."""
    with contextlib.redirect_stdout(shown := io.StringIO()):
        main([f"--source={out.parent / 'source'}", f"--out={out}", "--tokenizer=byte", "--seq_len=16", "--workers=1"])
    words = shlex.split(shown.getvalue().partition("seqjax train ")[2])
    if not words:
        return False
    overrides = [
        (key, value) for key, _, value in (word.removeprefix("--config.").partition("=") for word in words[1:])
    ]
    name = words[0].removeprefix("--config=").replace(":demo", ":debug")
    config = from_config_dict(presets.read_config(name, [*overrides, ("data.corpus", "blocks")]))
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    next(corpus.train_iterator(batch_size=4))
    return all(len(corpus.eval_blocks(domain, count=4).tokens) for domain in corpus.eval_domains)


def of_records(out: Path) -> Path:
    return min((out / "train").rglob("*.array_record"))


DAMAGES: list[tuple[str, Callable[[Path], Any]]] = [
    ("deleted blocks", lambda out: of_records(out).unlink()),
    ("cut blocks", lambda out: of_records(out).write_bytes(of_records(out).read_bytes()[:100])),
    ("overwritten blocks", lambda out: of_records(out).write_bytes(bytes(of_records(out).stat().st_size))),
    ("other blocks", lambda out: shutil.copy(max((out / "train").rglob("*.array_record")), of_records(out))),
    ("deleted documents", lambda out: (out / "documents.npz").unlink()),
    ("cut documents", lambda out: (out / "documents.npz").write_bytes(b"")),
    ("foreign sources", lambda out: (out / "sources.npz").write_bytes(b"mine")),
    ("no manifest", lambda out: (out / "manifest.json").unlink()),
    ("cut manifest", lambda out: (out / "manifest.json").write_bytes(b"{")),
    ("later manifest", lambda out: (out / "manifest.json").write_text('{"format": 2}')),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=[name for name, _ in DAMAGES])
def test_prepare_and_train_refuse_the_same_damage(tmp_path: Path, name: str, damage: Callable[[Path], Any]):
    write_corpus(tmp_path / "source", documents=6, shards=1)
    config = DataConfig(corpus="blocks", path=str(tmp_path / "out"), tokenizer="byte")
    assert trains(tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(UserError) as refused:
        trains(tmp_path / "out")
    with pytest.raises(UserError) as by_train:
        open_corpus(config, seq_len=16, vocab_size=264)
    for error in (refused, by_train):
        fix = str(error.value)
        if "delete it," in fix:
            (tmp_path / "out" / "sources.npz").unlink(missing_ok=True)
        elif "delete" in fix:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        else:
            assert re.search(r"another --out|another directory|--out=NEW_DIR", fix), fix
            assert trains(tmp_path / "another")
    assert "delete" not in fix or trains(tmp_path / "out")


@pytest.mark.parametrize("content", [None, b"", b"mine"])
def test_stored_tokenizer_is_rewritten(tmp_path: Path, content: bytes | None):
    write_corpus(tmp_path / "source", documents=3, shards=1)
    assert trains(tmp_path / "out")
    path = tmp_path / "out" / "tokenizer.npz"
    before = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    assert trains(tmp_path / "out")
    assert stored_tokenizer.read(path, why="").hash == BYTE.hash
    assert len(path.read_bytes()) == len(before)


TEXTS = {
    name: [row(name, f"{i} {some_text(np.random.default_rng(0), 30)}") for i in range(20)] for name in slimpajama.NAMES
}


@pytest.mark.parametrize(
    ("files", "can"),
    [
        ({"train": slimpajama.NAMES}, True),  # trained domains without validation text are not evaluated
        ({"train": ["c4"], "validation": ["arxiv"]}, True),
        ({"train": ["arxiv", "github"]}, True),
        ({"train": ["arxiv"]}, False),
        ({"validation": ["c4"]}, False),
        ({"test": ["c4", "arxiv"]}, False),
    ],
)
def test_printed_training_command_trains(tmp_path: Path, files: dict[str, list[str]], can: bool):
    for split, names in files.items():
        write_shard(tmp_path / "source" / split / "a.jsonl.zst", [line for name in names for line in TEXTS[name]])
    assert trains(tmp_path / "out") is can


def test_concurrent_preparations_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both errors name the holder, which writes the bytes of a single preparation."""
    source, out = write_corpus(tmp_path / "source", documents=3, shards=1), tmp_path / "out"
    refused, done, tokenise = [], [], run._tokenise

    def slow(*arguments: Any) -> Any:
        while len(refused) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
        return tokenise(*arguments)

    def begin(seq_len: int) -> None:
        try:
            prepared(source, out, seq_len=seq_len)
            done.append(seq_len)
        except UserError as error:
            refused.append(str(error))

    limit = time.monotonic() + 60
    monkeypatch.setattr(run, "_tokenise", slow)
    threads = [threading.Thread(target=begin, args=[seq_len]) for seq_len in (16, 16, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(done), len(refused)) == (1, 2)
    for error in refused:
        assert f"process {os.getpid()} on {socket.gethostname()}" in error
    prepared(source, tmp_path / "single", seq_len=done[0])
    assert contents(out) == contents(tmp_path / "single")
    with pytest.raises(UserError, match=r"block \d+ -> \d+"):  # a different block length is refused
        prepared(source, out, seq_len=24 - done[0])


def test_killed_preparation_releases_its_lock(tmp_path: Path):
    source, out = write_corpus(tmp_path / "source", documents=3, shards=1), tmp_path / "out"
    hold = f"import os, pathlib; from seqjax.data.prepare.lock import locked; out = pathlib.Path({str(out)!r})\n"
    hold += "with locked(out): print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} on {socket.gethostname()}"):
            prepared(source, out)
        holder.kill()
    assert [path.name for path in out.iterdir()] == [lock.FILE]
    prepared(source, out)
    assert not (out / lock.FILE).exists()


def test_deleted_lock_file_keeps_its_next_holder(tmp_path: Path):
    first, second = lock.locked(tmp_path / "out"), lock.locked(tmp_path / "out")
    with first:
        (tmp_path / "out" / lock.FILE).unlink()
        second.__enter__()
    with pytest.raises(UserError, match=str(os.getpid())), lock.locked(tmp_path / "out"):
        pass
    second.__exit__(None, None, None)
    assert not (tmp_path / "out").exists()


def test_linked_lock_file_is_not_overwritten(tmp_path: Path):
    source, out = write_corpus(tmp_path / "source", documents=3, shards=1), tmp_path / "out"
    out.mkdir()
    (tmp_path / "mine").write_text("mine")
    (out / lock.FILE).symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"Cannot write .*/out: .*--out"):
        prepared(source, out)
    assert (tmp_path / "mine").read_text() == "mine"
