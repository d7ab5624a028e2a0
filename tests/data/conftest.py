"""Small corpora in SlimPajama's layout, made of invented words, and checkpoints through Orbax files."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest
import zstandard

from seqjax.data import prepare, slimpajama

SET_NAMES = {d.name: d.set_name for d in slimpajama.DOMAINS}
WORDS = ["ba", "ki", "mo", "lu", "ter", "vis", "on", "e", "quo", "ß", "\n"]


def row(domain: str, text: str) -> bytes:
    """A line of a shard."""
    meta = {"redpajama_set_name": SET_NAMES.get(domain, domain)}
    return json.dumps({"text": text, "meta": meta}, ensure_ascii=False).encode() + b"\n"


def write_shard(path: Path, lines: list[bytes]) -> Path:
    """Compress lines into a shard."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.ZstdCompressor().compress(b"".join(lines)))
    return path


def some_text(rng: np.random.Generator, words: int) -> str:
    """Words in a row; never blank."""
    return "x" + " ".join(rng.choice(WORDS, words))


def write_corpus(root: Path, *, documents: int = 40, shards: int = 3, seed: int = 0) -> Path:
    """Mixed train and validation shards with `documents` of every domain in each."""
    rng = np.random.default_rng(seed)
    for split, count in (("train", shards), ("validation", 1)):
        for index in range(count):
            lines = [
                row(domain, f"{domain} {split} {index} {i} {some_text(rng, int(rng.integers(1, 40)))}")
                for domain in slimpajama.NAMES
                for i in range(documents)
            ]
            order = rng.permutation(len(lines))
            write_shard(root / split / f"example_{index}.jsonl.zst", [lines[i] for i in order])
    return root


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SlimPajama-shaped shards, domains mixed."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def blocks_dir(tmp_path_factory: pytest.TempPathFactory, corpus_dir: Path) -> Path:
    """`corpus_dir` as blocks of 32 + 1 bytes."""
    out = tmp_path_factory.mktemp("blocks") / "out"
    prepare.prepare(str(corpus_dir), out, tokenizer="byte", seq_len=32, workers=1)
    return out


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ocp.CheckpointManager]:
    """Orbax, as a run uses it."""
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        yield manager


def save(manager: ocp.CheckpointManager, step: int, iterator: grain.DatasetIterator) -> None:
    """Write the iterator's state to files."""
    manager.save(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))


def restore(manager: ocp.CheckpointManager, step: int, iterator: grain.DatasetIterator) -> None:
    """Set the iterator to the state in the files."""
    manager.restore(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(iterator)))


def assert_resumes(
    manager: ocp.CheckpointManager, new: Callable[[], grain.DatasetIterator], *, points: int, after: int
) -> None:
    """Save before each of `points` batches; a new iterator from each gives the same next `after` batches."""
    iterator = new()
    seen: list[Any] = []
    for step in range(points + after):
        if step < points:
            save(manager, step, iterator)
        seen.append(next(iterator)["tokens"])
    manager.wait_until_finished()
    iterator.close()
    for step in range(points):
        resumed = new()
        restore(manager, step, resumed)
        for expected in seen[step : step + after]:
            np.testing.assert_array_equal(next(resumed)["tokens"], expected)
        resumed.close()


def prepared(source: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The manifest of blocks of 16 bytes, made in this process."""
    return prepare.prepare(str(source), out, **{"tokenizer": "byte", "seq_len": 16, "workers": 1} | options)


def contents(root: Path) -> dict[str, bytes]:
    """Every file below `root`."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def command(source: Path, out: Path, *options: str) -> list[str]:
    """The same as a command."""
    flags = [f"--source={source}", f"--out={out}", "--tokenizer=byte", "--seq_len=16", *options]
    return [sys.executable, "-m", "seqjax.data.prepare", *flags]
