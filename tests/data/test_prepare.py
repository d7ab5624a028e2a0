"""Preparing blocks: every token once and in order, also after an interruption."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqjax.commands import train as train_command
from seqjax.config import from_config_dict, presets
from seqjax.data import blocks, manifests, open_corpus, shards, slimpajama
from seqjax.data.prepare import __main__ as prepare
from seqjax.data.prepare import pack, run
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError

from .conftest import command, contents, prepared, row, some_text, write_corpus, write_shard

BYTE = ByteTokenizer()
# A spawned worker imports its parent's main module and the modules of its functions.
WITHOUT_JAX = """
import sys
import seqjax.__main__, seqjax.commands.cli, seqjax.data.prepare.__main__
from seqjax.data import prepare
from seqjax.data.prepare import cluster, pack, progress, tokenize
prepare.prepare(*sys.argv[1:], tokenizer="byte", seq_len=16, workers=1)
heavy = {name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib", "flax", "grain", "orbax"}
assert not heavy, heavy
"""


def stream(out: Path, manifest: dict[str, Any], split: str, domain: str) -> np.ndarray:
    """Return the tokens of a domain's blocks in order."""
    source = blocks.RecordBlocks(out, manifest["splits"][split][domain], block=manifest["block"], vocab_size=258)
    return np.frombuffer(b"".join(source[i] for i in range(len(source))), "<u2")


def test_blocks_contain_every_token_in_order(corpus_dir: Path, tmp_path: Path):
    manifest = prepared(corpus_dir, tmp_path / "out")
    for split, count in (("train", 3), ("validation", 1)):
        split_shards = [s for s in shards.find_shards(str(corpus_dir)) if s.split == split]
        assert len(split_shards) == count
        for domain in slimpajama.NAMES:
            rows = [shards.parse(line) for shard in split_shards for line in shard.records()]
            texts = [each.text for each in rows if each.domain == domain]
            expected = np.concatenate([np.array([BYTE.bos, *BYTE.encode(text), BYTE.eos]) for text in texts])
            entry = manifest["splits"][split][domain]
            tokens = stream(tmp_path / "out", manifest, split, domain)
            np.testing.assert_array_equal(tokens, expected[: len(tokens)])
            assert len(expected) - len(tokens) == entry["tokens_unused"] < 17
            assert entry["tokens"] == len(expected)
            assert entry["documents"] == len(texts) == sum(entry["documents_by_log2_tokens"])
            assert entry["bytes"] == sum(len(text.encode()) for text in texts)
    assert not (tmp_path / "out" / ".parts").exists()
    assert manifests.read_manifest(tmp_path / "out") == manifest


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=8),
    block=st.integers(1, 9),
    records=st.integers(1, 7),
    read=st.integers(1, 11),
)
def test_cut_keeps_every_token_once(tmp_path_factory, lengths, block, records, read):
    """Any stream lengths, block sizes and file sizes give the same tokens."""
    root = tmp_path_factory.mktemp("cut")
    first = np.cumsum([0, *lengths])
    parts = []
    for index, (start, stop) in enumerate(itertools.pairwise(first)):
        np.arange(start, stop, dtype="<u2").tofile(root / f"{index}.bin")
        parts.append((root / f"{index}.bin", 0, int(stop - start)))
    total = int(first[-1]) // block * block
    got = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "READ_TOKENS", read)
        for start in range(0, total, records * block):
            cut = pack.cut(parts, start, min(start + records * block, total))
            job = pack.FileJob(path=root / "f", done=root / "d.json", segments=cut, block=block)
            pack.write_file(job)
            done = json.loads((root / "d.json").read_text())
            assert done["blocks"] <= records
            source = blocks.RecordBlocks(root, {"files": [{"path": "f", **done}]}, block=block, vocab_size=1 << 16)
            got += [np.frombuffer(source[i], "<u2") for i in range(len(source))]
    assert all(len(b) == block for b in got)
    np.testing.assert_array_equal(np.concatenate(got) if got else [], np.arange(total))


def test_block_files_have_at_most_max_records(corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one_file = prepared(corpus_dir, tmp_path / "one_file")
    monkeypatch.setattr(manifests, "MAX_RECORDS", 50)
    split = prepared(corpus_dir, tmp_path / "split")
    files = split["splits"]["train"]["c4"]["files"]
    assert [file["blocks"] for file in files[:-1]] == [50] * (len(files) - 1)
    assert len(files) > 2
    args = ("train", "c4")
    np.testing.assert_array_equal(
        stream(tmp_path / "one_file", one_file, *args), stream(tmp_path / "split", split, *args)
    )


@pytest.mark.slow  # starts four processes; test_parallel_errors_raise_the_first_in_job_order is a fast check
def test_worker_count_does_not_change_the_bytes(corpus_dir: Path, tmp_path: Path):
    prepared(corpus_dir, tmp_path / "one", workers=1)
    prepared(corpus_dir, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("kill_after", [(3,), (1, 5)], ids=["once", "twice"])
def test_killed_preparation_resumes_to_the_same_bytes(tmp_path: Path, kill_after: tuple[int, ...]):
    source = write_corpus(tmp_path / "source", documents=300, shards=8)
    prepared(source, tmp_path / "uninterrupted")
    expected = contents(tmp_path / "uninterrupted")
    out = tmp_path / "killed"
    kills = 0
    for shards_done in kill_after:
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
    assert kills
    assert contents(out) == expected


def test_incomplete_files_of_a_kill_are_replaced(corpus_dir: Path, tmp_path: Path):
    """A kill while writing a part, a block file or the manifest, or before cleanup."""
    out = tmp_path / "out"
    prepared(corpus_dir, out)
    expected = contents(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_remove", lambda parts: None)
        prepared(corpus_dir, tmp_path / "killed")
    killed = tmp_path / "killed"
    (killed / "manifest.json").unlink()
    (killed / ".parts" / "000001.json").unlink()
    (killed / ".parts" / "000001.bin").write_bytes(b"half")
    (killed / ".parts" / "000002.json").write_text('{"domains": {')
    (killed / ".parts" / "train-c4-00000.json").unlink()
    (killed / "train" / "c4-00000.array_record").write_bytes(b"torn")
    (killed / "train" / "book-00000.array_record").unlink()
    (killed / "train" / ".github-00000.array_record.77.tmp").write_bytes(b"left")
    prepared(corpus_dir, killed)
    assert contents(killed) == expected
    prepared(corpus_dir, killed)  # nothing to do
    assert contents(killed) == expected


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (".parts/000001.bin", lambda content: content[:-100]),
        (".parts/000001.bin", lambda content: content[:50] + b"??" + content[52:]),
        (".parts/000001.npz", lambda content: bytes(len(content))),
        (".parts/000001.sources.npz", lambda content: content[:-1]),
        ("train/c4-00000.array_record", lambda content: content[:-100]),
        ("train/c4-00000.array_record", lambda content: bytes(len(content))),
        (".parts/000001.json", lambda content: content.replace(b'"github"', b'"gitlab"')),
        (".parts/000001.json", lambda content: b'{"domains": [], "files": {}}'),
    ],
    ids=[
        "truncated part",
        "changed byte in a part",
        "zeroed lengths",
        "truncated sources",
        "truncated blocks",
        "zeroed blocks",
        "report with another domain",
        "malformed report",
    ],
)
def test_damaged_files_are_rebuilt(corpus_dir: Path, tmp_path: Path, file: str, change, capsys):
    """A power failure may truncate or zero a finished file."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_remove", lambda parts: None)
        prepared(corpus_dir, out)
    (out / "manifest.json").unlink()
    expected = {name: content for name, content in contents(out).items() if not name.startswith(".parts")}
    (out / file).write_bytes(change((out / file).read_bytes()))
    prepared(corpus_dir, out)
    (out / "manifest.json").unlink()
    assert contents(out) == expected
    is_reported = "1 finished parts" in capsys.readouterr().err
    assert is_reported == file.startswith(".parts")


def test_parts_with_unknown_settings_are_rebuilt(corpus_dir: Path, tmp_path: Path):
    """With a damaged `settings.json`, the settings of existing parts are unknown."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "_write", raises(KeyboardInterrupt))
        prepared(corpus_dir, out)
    (out / ".parts" / "settings.json").write_text("{")
    prepared(corpus_dir, out, max_tokens=5)
    prepared(corpus_dir, tmp_path / "new", max_tokens=5)
    assert contents(out) == contents(tmp_path / "new")


def raises(error: type[BaseException]) -> Callable[..., None]:
    """Return a function that raises `error`."""

    def function(*_: Any, **__: Any) -> None:
        raise error

    return function


def test_domain_directories_equal_set_names(tmp_path: Path):
    rng = np.random.default_rng(0)
    texts = [some_text(rng, 20) for _ in range(40)]
    write_shard(tmp_path / "by_meta" / "a.jsonl.zst", [row("arxiv", text) for text in texts])
    plain = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    write_shard(tmp_path / "by_directory" / "train" / "RedPajamaArXiv" / "chunk_1.jsonl.zst", plain)
    one, two = prepared(tmp_path / "by_meta", tmp_path / "one"), prepared(tmp_path / "by_directory", tmp_path / "two")
    assert manifests.manifest_hash(one) == manifests.manifest_hash(two)


def test_domains_and_lengths_are_selected(corpus_dir: Path, tmp_path: Path):
    everything = prepared(corpus_dir, tmp_path / "all")
    some = prepared(corpus_dir, tmp_path / "some", domains=["c4", "arxiv"])
    assert set(some["splits"]["train"]) == {"c4", "arxiv"}
    assert some["splits"]["train"]["c4"] == everything["splits"]["train"]["c4"]
    long = prepared(corpus_dir, tmp_path / "long", min_tokens=60, max_tokens=60)
    entry = long["splits"]["train"]["c4"]
    assert entry["tokens"] == entry["documents"] * 62
    assert long["too_short"] + sum(e["documents"] for d in long["splits"].values() for e in d.values()) == 4 * 7 * 40


@pytest.mark.slow
def test_command_exit_status_and_output(corpus_dir: Path, tmp_path: Path):
    done = subprocess.run(command(corpus_dir, tmp_path / "out"), capture_output=True, text=True, check=True)
    assert "commoncrawl" in done.stdout
    assert "tokens/s" in done.stderr
    assert "\x1b" not in done.stderr  # no terminal
    failed = subprocess.run(command(tmp_path / "absent", tmp_path / "o2"), capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert str(tmp_path / "absent") in failed.stderr
    assert "Traceback" not in failed.stderr


def test_command_options_equal_function_arguments(corpus_dir: Path, tmp_path: Path):
    """Every option changes the output as the argument of the same name does."""
    flags = ["--seq_len=24", "--domains=c4,arxiv", "--min_tokens=60", "--max_tokens=70", "--workers=1"]
    prepare.main(command(corpus_dir, tmp_path / "command", *flags)[3:])
    options = {"seq_len": 24, "domains": ["c4", "arxiv"], "min_tokens": 60, "max_tokens": 70}
    prepared(corpus_dir, tmp_path / "function", **options)
    assert contents(tmp_path / "command") == contents(tmp_path / "function")
    for name in options:
        rest = {key: value for key, value in options.items() if key != name}
        prepared(corpus_dir, tmp_path / name, **rest)
        assert contents(tmp_path / name) != contents(tmp_path / "function"), name


@pytest.mark.parametrize("domains", [["c4", "commoncrawl", "arxiv", "github", "stackexchange"], ["c4", "arxiv"]])
def test_printed_command_opens_the_blocks(corpus_dir: Path, tmp_path: Path, capsys, domains):
    """With all domains of a regime, and with two domains."""
    prepare.main(command(corpus_dir, tmp_path / "o u t", "--workers=1", f"--domains={','.join(domains)}")[3:])
    argv = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert argv[:2] == ["seqjax", "train"]
    (config_flag,), overrides = train_command.split_overrides(argv[2:])
    config = from_config_dict(presets.read_config(config_flag.removeprefix("--config="), overrides))
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    assert (corpus.name, corpus.seq_len) == ("blocks", 16)
    assert set(corpus.eval_domains) == set(domains)


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--strict", "a.jsonl.zst:2: not JSON"), ("--tokenizer_path=some.model", "config.data.tokenizer_path")],
)
def test_bad_lines_and_tokenizer_path_are_refused(tmp_path: Path, flag: str, message: str):
    write_shard(tmp_path / "source" / "a.jsonl.zst", [row("c4", "good"), b"{not json\n"])
    args = command(tmp_path / "source", tmp_path / "out", "--workers=1", flag)
    with pytest.raises(UserError, match=message):
        prepare.main(args[3:])


def test_workers_do_not_import_jax(corpus_dir: Path, tmp_path: Path):
    """The import would cost every worker two seconds and about 200 MB."""
    args = [sys.executable, "-c", WITHOUT_JAX, str(corpus_dir), str(tmp_path / "out")]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.json").is_file()
