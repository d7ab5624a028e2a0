"""Write small corpora in SlimPajama's layout, and save iterators with Orbax."""

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
    """Return one JSON line of a shard."""
    meta = {"redpajama_set_name": SET_NAMES.get(domain, domain)}
    return json.dumps({"text": text, "meta": meta}, ensure_ascii=False).encode() + b"\n"


def write_shard(path: Path, lines: list[bytes]) -> Path:
    """Write lines as a zstd shard."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.ZstdCompressor().compress(b"".join(lines)))
    return path


def some_text(rng: np.random.Generator, words: int) -> str:
    """Return `words` random words; never blank."""
    return "x" + " ".join(rng.choice(WORDS, words))


def write_corpus(root: Path, *, documents: int = 40, shards: int = 3, seed: int = 0) -> Path:
    """Write train and validation shards; each has `documents` texts per domain."""
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
    """Shards in SlimPajama's layout with all domains mixed."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def blocks_dir(tmp_path_factory: pytest.TempPathFactory, corpus_dir: Path) -> Path:
    """`corpus_dir` as blocks of 33 bytes."""
    out = tmp_path_factory.mktemp("blocks") / "out"
    prepare.prepare(str(corpus_dir), out, tokenizer="byte", seq_len=32, workers=1)
    return out


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ocp.CheckpointManager]:
    """The Orbax manager that a run uses."""
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        yield manager


def save(manager: ocp.CheckpointManager, step: int, iterator: grain.DatasetIterator) -> None:
    """Save the iterator state at a step."""
    manager.save(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))


def restore(manager: ocp.CheckpointManager, step: int, iterator: grain.DatasetIterator) -> None:
    """Restore the iterator state of a step."""
    manager.restore(step, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(iterator)))


def assert_resumes(
    manager: ocp.CheckpointManager, new: Callable[[], grain.DatasetIterator], *, points: int, after: int
) -> None:
    """Save before `points` batches; each restored iterator repeats the next `after`."""
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
    """Prepare blocks of 17 bytes in this process and return the manifest."""
    return prepare.prepare(str(source), out, **{"tokenizer": "byte", "seq_len": 16, "workers": 1} | options)


def contents(root: Path) -> dict[str, bytes]:
    """Return all files below `root`: relative path -> content."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def command(source: Path, out: Path, *options: str) -> list[str]:
    """Return the `seqjax prepare` command with the settings of `prepared`."""
    flags = [f"--source={source}", f"--out={out}", "--tokenizer=byte", "--seq_len=16", *options]
    return [sys.executable, "-m", "seqjax.data.prepare", *flags]
