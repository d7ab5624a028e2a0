"""Changed text and changed blocks are detected."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqjax.config import DataConfig
from seqjax.data import blocks, open_corpus
from seqjax.data.layout import Layout
from seqjax.data.prepare import run
from seqjax.data.prepare.results import summary
from seqjax.errors import UserError

from .conftest import contents, prepared, row, some_text

LAYOUT = Layout(domain="x")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three uncompressed files, so text can change at equal size."""
    root = tmp_path / "source"
    root.mkdir()
    for i in range(3):
        lines = [json.dumps({"text": f"{i} {j} {some_text(np.random.default_rng(j), 12)}"}) for j in range(40)]
        (root / f"{i}.jsonl").write_text("\n".join(lines))
    return root


def change(path: Path) -> None:
    """Change one letter; the file size stays equal."""
    content = path.read_bytes()
    at = content.index(b"20 x")
    path.write_bytes(content[: at + 3] + b"y" + content[at + 4 :])
    assert path.stat().st_size == len(content)


def stopped(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a preparation that stops after all parts are written."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "_write", stop)
        prepared(source, out, layout=LAYOUT)


def test_finished_preparation_refuses_changed_text(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    manifest = prepared(source, out, layout=LAYOUT)
    assert prepared(source, out, layout=LAYOUT) == manifest
    original = (source / "1.jsonl").read_bytes()
    change(source / "1.jsonl")
    with pytest.raises(UserError, match=r"1\.jsonl has changed"):
        prepared(source, out, layout=LAYOUT)
    (source / "1.jsonl").write_bytes(original)
    assert prepared(source, out, layout=LAYOUT) == manifest
    assert not (out / ".parts").exists()


def test_stopped_preparation_refuses_changed_text(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prepared(source, tmp_path / "uninterrupted", layout=LAYOUT)
    stopped(source, tmp_path / "out", monkeypatch)
    original = (source / "2.jsonl").read_bytes()
    change(source / "2.jsonl")
    with pytest.raises(UserError, match=r"2\.jsonl has changed"):
        prepared(source, tmp_path / "out", layout=LAYOUT)
    (source / "2.jsonl").write_bytes(original)
    prepared(source, tmp_path / "out", layout=LAYOUT)
    assert contents(tmp_path / "out") == contents(tmp_path / "uninterrupted")


@pytest.mark.parametrize("at", ["_tokenise", "_write"])
def test_running_preparation_refuses_changed_text(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
):
    real = getattr(run, at)

    def then_change(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        change(source / "0.jsonl")
        return result

    monkeypatch.setattr(run, at, then_change)
    with pytest.raises(UserError, match=r"0\.jsonl has changed"):
        prepared(source, tmp_path / "out", layout=LAYOUT)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_only_verify_compares_text_with_old_times(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out"
    manifest = prepared(source, out, layout=LAYOUT)
    change(source / "1.jsonl")
    later = (out / "manifest.json").stat().st_mtime + 1000
    os.utime(out / "manifest.json", (later, later))
    assert prepared(source, out, layout=LAYOUT) == manifest, "text older than the blocks is not compared"
    with pytest.raises(UserError, match=r"1\.jsonl has changed"):
        prepared(source, out, layout=LAYOUT, verify=True)


def test_manifest_without_text_hashes_warns(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    manifest = prepared(source, out, layout=LAYOUT)
    del manifest["text_sha256"], manifest["beside"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    change(source / "1.jsonl")
    assert prepared(source, out, layout=LAYOUT) == manifest
    assert "not compared" in capsys.readouterr().err


def opened(path: Path) -> Any:
    config = DataConfig(corpus="blocks", path=str(path), train_domains=("c4",), eval_domains=("c4",))
    return open_corpus(config, seq_len=16, vocab_size=258)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two block directories, prepared from texts of equal size."""
    made = []
    for seed in (0, 1):
        source, letter = tmp_path / f"source{seed}", "ab"[seed]
        for split in ("train", "validation"):
            (source / split).mkdir(parents=True)
            lines = [row("c4", f"{split} {i} {letter * 20}") for i in range(200)]
            (source / split / "a.jsonl").write_bytes(b"".join(lines))
        prepared(source, tmp_path / f"out{seed}")
        made.append(tmp_path / f"out{seed}")
    return made[0], made[1]


def test_blocks_of_another_preparation_are_refused(two: tuple[Path, Path]):
    one, other = two
    assert opened(one).manifest_hash != opened(other).manifest_hash
    name = "train/c4-00000.array_record"
    assert (one / name).stat().st_size == (other / name).stat().st_size
    shutil.copy(other / name, one / name)
    with pytest.raises(UserError, match=r"c4-00000\.array_record .*damaged, block"):
        opened(one)


def test_documents_of_another_preparation_are_refused(two: tuple[Path, Path]):
    one, _ = two
    lengths = dict(np.load(one / "documents.npz"))
    lengths["train/c4"][0] += 1
    lengths["train/c4"][1] -= 1
    np.savez_compressed(one / "documents.npz", allow_pickle=False, **lengths)
    with pytest.raises(UserError, match=r"documents\.npz"):
        opened(one)


def test_block_file_is_compared_at_its_first_read(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    one, other = two
    monkeypatch.setattr(blocks, "CHECKED_FILES", 0)
    monkeypatch.setattr(blocks.RecordBlocks, "compare", lambda self, n_files: None)
    name = "train/c4-00000.array_record"
    shutil.copy(other / name, one / name)
    iterator = opened(one).train_iterator(batch_size=2)
    with pytest.raises(UserError, match=r"c4-00000\.array_record .*damaged, block"):
        next(iterator)
    iterator.close()


def test_verify_compares_all_blocks(two: tuple[Path, Path], tmp_path: Path):
    one, _ = two
    name = "train/c4-00000.array_record"
    content = (one / name).read_bytes()
    at = content.index(b"a\0a\0a\0", content.rindex(b"a\0a\0a\0") // 2)  # in a block without a checksum in the manifest
    (one / name).write_bytes(content[:at] + b"b" + content[at + 1 :])
    prepared(tmp_path / "source0", one)
    with pytest.raises(UserError, match=r"c4-00000\.array_record"):
        prepared(tmp_path / "source0", one, verify=True)


def test_blocks_without_checksums_warn(two: tuple[Path, Path], caplog: pytest.LogCaptureFixture):
    """Earlier versions wrote no checksums."""
    one, _ = two
    manifest = json.loads((one / "manifest.json").read_text())
    expected_hash = opened(one).manifest_hash
    del manifest["beside"], manifest["text_sha256"]
    for entry in (entry for domains in manifest["splits"].values() for entry in domains.values()):
        for file in entry["files"]:
            del file["sampled"]
    (one / "manifest.json").write_text(json.dumps(manifest))
    caplog.clear()
    assert opened(one).manifest_hash == expected_hash
    assert len([record for record in caplog.records if "not checked" in record.getMessage()]) == 1


def test_texts_in_two_splits_are_counted(tmp_path: Path):
    texts = {"train": ["a b c d"] * 3 + ["e f g h i"] * 9, "val": ["a b c d", "x y z"] * 4, "test": ["q r s"] * 9}
    for split, each in texts.items():
        path = tmp_path / "source" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(json.dumps({"text": text}) for text in each))
    manifest = prepared(tmp_path / "source", tmp_path / "out", layout=LAYOUT)
    assert manifest["in_two_splits"] == {"validation": 1}
    assert "1 texts of the validation split" in summary(manifest)
    (tmp_path / "source" / "val.jsonl").write_text(json.dumps({"text": "x y z 1 2 3 4 5 6 7"}) + "\n")
    assert "in_two_splits" not in prepared(tmp_path / "source", tmp_path / "other", layout=LAYOUT)


def test_stream_refuses_to_resume_on_changed_text(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """File names and sizes are equal; a saved position without a hash is still read."""
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.jsonl").write_bytes(b"".join(row("c4", f"{split} {i:03d} words") for i in range(300)))
    config = DataConfig(corpus="stream", path=str(tmp_path), train_domains=("c4",), eval_domains=("c4",))

    def iterator() -> Any:
        return open_corpus(config, seq_len=16, vocab_size=258).train_iterator(batch_size=2)

    begun = iterator()
    next(begun)
    state = begun.get_state()
    begun.close()
    iterator().set_state(state)
    path = tmp_path / "train" / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"150 words", b"150 sword"))
    with pytest.raises(UserError, match="text: "):
        iterator().set_state(state)
    del state["identity"]["text"]
    caplog.clear()
    iterator().set_state(state)
    assert len([record for record in caplog.records if "not checked" in record.getMessage()]) == 1
