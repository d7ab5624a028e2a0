"""Preparing blocks: nothing lost, nothing repeated, resumable, and clear about what is wrong."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqjax.data import assembly, blocks, prepare, shard_jobs, shards, slimpajama
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError

from .conftest import row, some_text, write_corpus, write_shard

BYTE = ByteTokenizer()


def run(source: Path, out: Path, **options: Any) -> dict[str, Any]:
    return prepare.prepare(str(source), out, **{"tokenizer": "byte", "seq_len": 16, "workers": 1} | options)


def stream(out: Path, manifest: dict[str, Any], split: str, domain: str) -> np.ndarray:
    """All tokens of the blocks of a domain, in order."""
    source = blocks.record_blocks(out, manifest["splits"][split][domain])
    return np.frombuffer(b"".join(source[i] for i in range(len(source))), "<u2")


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def command(source: Path, out: Path, *options: str) -> list[str]:
    flags = [f"--source={source}", f"--out={out}", "--tokenizer=byte", "--seq_len=16", *options]
    return [sys.executable, "-m", "seqjax.data.prepare", *flags]


def test_blocks_hold_every_token_in_order(corpus_dir: Path, tmp_path: Path):
    manifest = run(corpus_dir, tmp_path / "out")
    for split, count in (("train", 3), ("validation", 1)):
        found = [s for s in shards.find_shards(str(corpus_dir)) if s.split == split]
        assert len(found) == count
        for domain in slimpajama.NAMES:
            rows = [shards.parse(line) for shard in found for line in shards.read_lines(shard)]
            texts = [text for name, text in rows if name == domain]
            expected = np.concatenate([np.array([BYTE.bos, *BYTE.encode(text), BYTE.eos]) for text in texts])
            entry = manifest["splits"][split][domain]
            tokens = stream(tmp_path / "out", manifest, split, domain)
            np.testing.assert_array_equal(tokens, expected[: len(tokens)])
            assert len(expected) - len(tokens) == entry["tokens_unused"] < 17
            assert entry["tokens"] == len(expected)
            assert entry["documents"] == len(texts) == sum(entry["documents_by_log2_tokens"])
            assert entry["bytes"] == sum(len(text.encode()) for text in texts)
    assert not (tmp_path / "out" / ".parts").exists()
    assert blocks.read_manifest(tmp_path / "out") == manifest


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    block=st.integers(1, 9),
    records=st.integers(1, 7),
    read=st.integers(1, 11),
)
def test_cutting_loses_and_repeats_nothing(tmp_path_factory, lengths, block, records, read):
    """Streams of any lengths, cut into blocks and files of any size, give the same tokens back."""
    root = tmp_path_factory.mktemp("cut")
    first = np.cumsum([0, *lengths])
    parts = []
    for index, (start, stop) in enumerate(itertools.pairwise(first)):
        np.arange(start, stop, dtype="<u2").tofile(root / f"{index}.bin")
        parts.append((root / f"{index}.bin", 0, int(stop - start)))
    total = int(first[-1]) // block * block
    got = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_jobs, "READ_TOKENS", read)
        for start in range(0, total, records * block):
            cut = assembly.cut(parts, start, min(start + records * block, total))
            job = shard_jobs.FileJob(path=root / "f", done=root / "d.json", segments=cut, block=block)
            shard_jobs.write_file(job)
            done = json.loads((root / "d.json").read_text())
            assert done["blocks"] <= records
            source = blocks.record_blocks(root, {"files": [{"path": "f", **done}]})
            got += [np.frombuffer(source[i], "<u2") for i in range(len(source))]
    assert all(len(b) == block for b in got)
    np.testing.assert_array_equal(np.concatenate(got) if got else [], np.arange(total))


def test_files_hold_at_most_so_many_records(corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = run(corpus_dir, tmp_path / "whole")
    monkeypatch.setattr(blocks, "MAX_RECORDS", 50)
    split = run(corpus_dir, tmp_path / "split")
    files = split["splits"]["train"]["c4"]["files"]
    assert [file["blocks"] for file in files[:-1]] == [50] * (len(files) - 1)
    assert len(files) > 2
    args = ("train", "c4")
    np.testing.assert_array_equal(stream(tmp_path / "whole", whole, *args), stream(tmp_path / "split", split, *args))


def test_any_number_of_workers_gives_the_same_bytes(corpus_dir: Path, tmp_path: Path):
    run(corpus_dir, tmp_path / "one", workers=1)
    run(corpus_dir, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path):
    source = write_corpus(tmp_path / "source", documents=300, shards=8)
    run(source, tmp_path / "whole")
    wanted = contents(tmp_path / "whole")
    out = tmp_path / "killed"
    kills = 0
    for shards_done in (1, 4, 7):
        process = subprocess.Popen(
            command(source, out, "--workers=2"), stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if len(list((out / ".parts").glob("0*.json"))) >= shards_done:
                os.kill(process.pid, signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
                break
            time.sleep(0.002)
    finished = subprocess.run(command(source, out, "--workers=2"), capture_output=True, text=True, check=True)
    assert "manifest hash" in finished.stdout
    assert kills >= 2
    assert contents(out) == wanted


def test_leftovers_of_a_kill_do_not_matter(corpus_dir: Path, tmp_path: Path):
    """Killed while a part, a file of blocks or the manifest was written, or before the parts were removed."""
    out = tmp_path / "out"
    run(corpus_dir, out)
    wanted = contents(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *a, **k: None)
        run(corpus_dir, tmp_path / "kept")
    kept = tmp_path / "kept"
    (kept / "manifest.json").unlink()
    (kept / ".parts" / "000001.json").unlink()
    (kept / ".parts" / "000001.bin").write_bytes(b"half")
    (kept / ".parts" / "000002.json").write_text('{"domains": {')
    (kept / ".parts" / "train-c4-00000.json").unlink()
    (kept / "train" / "c4-00000.array_record").write_bytes(b"torn")
    (kept / "train" / "book-00000.array_record").unlink()
    (kept / "train" / ".github-00000.array_record.77.tmp").write_bytes(b"left")
    run(corpus_dir, kept)
    assert contents(kept) == wanted
    assert contents(kept) == wanted
    run(corpus_dir, kept)  # nothing to do


@pytest.fixture
def bad_source(tmp_path: Path) -> Path:
    """One shard with a line of every fault between good ones, and a torn shard."""
    rng = np.random.default_rng(0)
    good = [row("c4", some_text(rng, 30)) for _ in range(6)]
    bad = [b"{not json\n", b'{"text": "\xff"}\n', row("c4", " "), row("RedPajamaX", "x"), b'{"meta": {}}\n']
    mixed = [line for pair in zip(good, bad) for line in pair] + good[5:]
    write_shard(tmp_path / "source" / "a.jsonl.zst", mixed)
    torn = write_shard(tmp_path / "source" / "b.jsonl.zst", [row("c4", f"{i} {some_text(rng, 50)}") for i in range(90)])
    torn.write_bytes(torn.read_bytes()[:-40])
    return tmp_path / "source"


def test_bad_lines_are_counted_and_named(bad_source: Path, tmp_path: Path):
    manifest = run(bad_source, tmp_path / "out")
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
    assert "6 lines skipped" in assembly.summary(manifest)
    assert "a.jsonl.zst:2: not JSON" in assembly.summary(manifest)


def test_strict_stops_at_the_first(bad_source: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"a\.jsonl\.zst:2: not JSON.*without --strict"):
        run(bad_source, tmp_path / "out", strict=True)
    with pytest.raises(UserError, match=r"a\.jsonl\.zst:2: not JSON.*without --strict"):
        run(bad_source, tmp_path / "out", strict=True, workers=2)


def test_strict_after_a_run_that_skipped(bad_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(assembly, "plan_files", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(bad_source, tmp_path / "out")
    with pytest.raises(UserError, match=r"a\.jsonl\.zst:2: not JSON"):
        run(bad_source, tmp_path / "out", strict=True)


def test_a_directory_per_domain_gives_the_same(tmp_path: Path):
    rng = np.random.default_rng(0)
    texts = [some_text(rng, 20) for _ in range(40)]
    write_shard(tmp_path / "by_meta" / "a.jsonl.zst", [row("arxiv", text) for text in texts])
    plain = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    write_shard(tmp_path / "by_directory" / "train" / "RedPajamaArXiv" / "chunk_1.jsonl.zst", plain)
    one, two = run(tmp_path / "by_meta", tmp_path / "one"), run(tmp_path / "by_directory", tmp_path / "two")
    assert blocks.manifest_hash(one) == blocks.manifest_hash(two)


def test_chosen_domains_and_lengths(corpus_dir: Path, tmp_path: Path):
    everything = run(corpus_dir, tmp_path / "all")
    some = run(corpus_dir, tmp_path / "some", domains=["c4", "arxiv"])
    assert set(some["splits"]["train"]) == {"c4", "arxiv"}
    assert some["splits"]["train"]["c4"] == everything["splits"]["train"]["c4"]
    long = run(corpus_dir, tmp_path / "long", min_tokens=60, max_tokens=60)
    entry = long["splits"]["train"]["c4"]
    assert entry["tokens"] == entry["documents"] * 62
    assert long["too_short"] + sum(e["documents"] for d in long["splits"].values() for e in d.values()) == 4 * 7 * 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 8}, "block 17 -> 9"),
        ({"domains": ["c4"]}, "domains"),
        ({"min_tokens": 3}, "min_tokens 0 -> 3"),
        ({"source": "other"}, "1 source files are new, gone or of another size"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str):
    source = write_corpus(tmp_path / "source", documents=3, shards=1)
    run(source, tmp_path / "out")
    if change.pop("source", None):
        write_shard(source / "train" / "new.jsonl.zst", [row("c4", "more")])
    with pytest.raises(UserError, match=message):
        run(source, tmp_path / "out", **change)


def test_another_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_corpus(tmp_path / "source", documents=3, shards=1)
    run(source, tmp_path / "out")
    monkeypatch.setattr(ByteTokenizer, "hash", "f" * 64)
    with pytest.raises(UserError, match=r"tokenizer byte .* -> byte \(ffffffffffff\)"):
        run(source, tmp_path / "out")


def test_a_foreign_directory_is_left_alone(corpus_dir: Path, tmp_path: Path):
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match="not empty"):
        run(corpus_dir, tmp_path)
    with pytest.raises(UserError, match="Did you mean 'arxiv'"):
        run(corpus_dir, tmp_path / "out", domains=["arxive"])


LIMITED = """
import resource, signal, sys
from seqjax.data import prepare
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    prepare.prepare(sys.argv[1], sys.argv[2], tokenizer="byte", seq_len=16, workers=1)
except prepare.UserError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [20_000, 60_000])
def test_no_room_on_the_disk(tmp_path: Path, limit: int):
    """A limit on the size of files, as a stand-in: it stops a part, or a file of blocks."""
    source = write_corpus(tmp_path / "source", documents=100, shards=2)
    write_shard(source / "train" / "a_small.jsonl.zst", [row("c4", "small")])
    arguments = [sys.executable, "-c", LIMITED, str(source), str(tmp_path / "out"), str(limit)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "Cannot write" in result.stdout, result.stderr
    assert "run the same command again" in result.stdout
    assert (tmp_path / "out" / ".parts" / "000000.json").is_file()
    run(source, tmp_path / "out")
    run(source, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_too_little_room_for_the_blocks(corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(UserError, match="make room"):
        run(corpus_dir, tmp_path / "out")


def test_command_line(corpus_dir: Path, tmp_path: Path):
    done = subprocess.run(command(corpus_dir, tmp_path / "out"), capture_output=True, text=True, check=True)
    assert "commoncrawl" in done.stdout
    assert "tokens/s" in done.stderr
    assert "\x1b" not in done.stderr  # no terminal
    failed = subprocess.run(command(tmp_path / "absent", tmp_path / "o2"), capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "no file or directory" in failed.stderr
    assert "Traceback" not in failed.stderr
