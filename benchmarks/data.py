"""Tokens per second of the data side: `python -m benchmarks.data [--quick] [--source=DIR]`.

1. Reading: synthetic block files (12 of 10,000 blocks of 2,049 tokens, 492 MB in a temporary directory; 2 of 2,000
   with --quick) through the training iterator of the limited regime, which shuffles and mixes.
2. Preparing: `seqjax.data.prepare` in this process alone, on the built-in corpus or on --source, with the Mixtral
   vocabulary where it is installed, else with bytes.

Writes benchmarks/results/data.json: the machine, versions, the median and every run.
"""

import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import zstandard
from absl import app, flags

from seqjax.config import DataConfig
from seqjax.data import blocks, load_tokenizer, open_corpus, prepare, slimpajama
from seqjax.data.builtin import extract
from seqjax.data.tokenizer import Tokenizer
from seqjax.errors import UserError
from seqjax.files import write_json

SEQ_LEN = 2048
BATCH = 64
TARGETS = {"blocks": 30e6, "prepare": 1.4e6}  # tokens/s, on two cores; on one


def write_blocks(out: Path, tokenizer: Tokenizer, *, files: int, records: int) -> None:
    """A directory as `prepare` leaves it, of random tokens, for commoncrawl and c4."""
    rng = np.random.default_rng(0)
    entries: dict[str, Any] = {}
    for index in range(files):
        domain = ("commoncrawl", "c4")[index % 2]
        path = out / "train" / f"{domain}-{index:05d}.array_record"
        tokens = rng.integers(0, tokenizer.vocab_size, (records, SEQ_LEN + 1), np.uint16)
        digest = blocks.write_records(path, iter([tokens]))
        entry = entries.setdefault(domain, {"blocks": 0, "files": []})
        entry["blocks"] += records
        entry["files"].append({"path": path.relative_to(out).as_posix(), "blocks": records, "sha256": digest})
    identity = {"name": tokenizer.name, "sha256": tokenizer.hash}
    manifest = {"format": blocks.FORMAT, "block": SEQ_LEN + 1, "tokenizer": identity}
    write_json(out / "manifest.json", manifest | {"splits": {"train": entries, "validation": entries}})


def read_rates(directory: Path, tokenizer: Tokenizer, *, runs: int, seconds: float) -> list[float]:
    """Tokens/s of the training iterator, one number a run."""
    config = DataConfig(
        corpus="blocks", path=str(directory), tokenizer=cast(Any, tokenizer.name), eval_domains=("commoncrawl", "c4")
    )
    corpus = open_corpus(config, seq_len=SEQ_LEN, vocab_size=tokenizer.vocab_size)
    iterator = corpus.train_iterator(batch_size=BATCH)
    for _ in range(20):
        next(iterator)
    rates = []
    for _ in range(runs):
        start, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds:
            next(iterator)
            count += 1
        rates.append(count * BATCH * SEQ_LEN / elapsed)
    iterator.close()
    return rates


def write_text(root: Path, *, megabytes: float) -> None:
    """One shard of the built-in corpus' prose and doctest: invented words would be far too easy to tokenise."""
    meta = {"redpajama_set_name": slimpajama.DOMAINS[0].set_name}
    lines, size = [], 0
    for document in extract.documents(extract.distributions()):
        if document.domain in ("prose", "doctest") and size < megabytes * 1e6:
            size += len(document.text)
            lines.append(json.dumps({"text": document.text, "meta": meta}))
    (root / "train").mkdir(parents=True)
    (root / "train" / "text.jsonl.zst").write_bytes(zstandard.compress("\n".join(lines).encode()))


def prepare_rates(source: str, tokenizer: Tokenizer, *, scratch: Path, runs: int) -> list[float]:
    """Tokens/s of a whole preparation on one core, one number a run."""
    rates = []
    for index in range(runs):
        out = scratch / f"prepared-{index}"
        load_tokenizer.cache_clear()  # with its table of words: every run begins cold
        start = time.perf_counter()
        manifest = prepare.prepare(source, out, tokenizer=tokenizer.name, seq_len=SEQ_LEN, workers=1)
        seconds = time.perf_counter() - start
        tokens = sum(entry["tokens"] for split in manifest["splits"].values() for entry in split.values())
        rates.append(tokens / seconds)
        shutil.rmtree(out)
    return rates


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    names = ("array_record", "grain", "numpy", "sentencepiece", "zstandard")
    versions = {name: metadata.version(name) for name in names if _installed(name)}
    return {
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
    }


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def benchmark(*, quick: bool, source: str = "") -> dict[str, Any]:
    """Measure both; gives what is written as JSON."""
    byte = load_tokenizer("byte")
    try:
        vocabulary = load_tokenizer("mixtral")
    except UserError as error:
        print(f"{error}\nMeasuring with bytes.")
        vocabulary = byte
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        files, records, seconds = (2, 2_000, 0.5) if quick else (12, blocks.MAX_RECORDS, 4.0)
        write_blocks(scratch / "blocks", byte, files=files, records=records)
        reading = read_rates(scratch / "blocks", byte, runs=3 if quick else 5, seconds=seconds)
        if not source:
            write_text(scratch / "text", megabytes=2 if quick else 30)
        preparing = prepare_rates(source or str(scratch / "text"), vocabulary, scratch=scratch, runs=2 if quick else 3)
    settings = {"quick": quick, "seq_len": SEQ_LEN, "batch": BATCH, "files": files, "records": records}
    results = {
        "blocks": {"median": statistics.median(reading), "runs": reading, "unit": "tokens/s"},
        "prepare": {
            "median": statistics.median(preparing),
            "runs": preparing,
            "unit": "tokens/s on one core",
            "tokenizer": vocabulary.name,
            "text": "given" if source else "built-in corpus",
        },
    }
    return {"machine": machine(), "settings": settings, "results": results}


def main(argv: list[str]) -> None:
    """Measure, print a table, write the JSON."""
    del argv
    given: Any = flags.FLAGS
    report = benchmark(quick=given.quick, source=given.source)
    print(f"{'':<10}{'median':>14}{'lowest':>14}{'target':>14}   million tokens/s")
    for name, result in report["results"].items():
        numbers = (result["median"], min(result["runs"]), TARGETS[name])
        print(f"{name:<10}" + "".join(f"{number / 1e6:>14.2f}" for number in numbers))
    path = Path(given.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"Wrote {path}.")


if __name__ == "__main__":
    flags.DEFINE_bool("quick", False, "Seconds instead of a minute.")
    flags.DEFINE_string("source", "", "Real shards to prepare instead of the built-in corpus.")
    flags.DEFINE_string("json", "benchmarks/results/data.json", "Where the report goes.")
    app.run(main)
