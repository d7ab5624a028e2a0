"""Measure the data pipeline's throughput (tokens/s):

    python -m benchmarks.data [--quick] [--source=DIR]

1. Reading: the training iterator of the limited regime, with shuffling and mixing, over synthetic block files in a
   temporary directory (12 files of 10,000 blocks of 2,049 tokens, 492 MB; --quick: 2 files of 2,000 blocks).
2. Preparing: `seqjax.data.prepare` in one process, on the built-in corpus or --source. The vocabulary is Mixtral's if
   it is installed, otherwise bytes.

Results (machine, versions, median and every run) go to benchmarks/results/data.json; with --quick or --source, to
runs/benchmarks/data.json.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, quick="seconds instead of a minute")
FLAGS.add_argument("--source", default="", help="real shards to prepare instead of the built-in corpus")
options.parse_early(FLAGS, __name__)

import json
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import zstandard

from benchmarks.harness import report
from benchmarks.harness.machine import machine
from seqjax.command_line import run_command
from seqjax.config import DataConfig
from seqjax.data import blocks, document_index, load_tokenizer, manifests, open_corpus, prepare, slimpajama
from seqjax.data.builtin import extract
from seqjax.data.tokenizer import Tokenizer
from seqjax.errors import UserError
from seqjax.files import write_json

SEQ_LEN = 2048
BATCH = 64
TABLE = report.Table(
    10,
    (
        report.Column("median", "median", ">14.2f", 1e-6),
        report.Column("lowest", "lowest", ">14.2f", 1e-6),
    ),
)


def write_blocks(out: Path, tokenizer: Tokenizer, *, files: int, records: int) -> None:
    """Write a prepared directory of random tokens for commoncrawl and c4."""
    rng = np.random.default_rng(0)
    entries: dict[str, Any] = {}
    for index in range(files):
        domain = ("commoncrawl", "c4")[index % 2]
        path = out / "train" / f"{domain}-{index:05d}.array_record"
        tokens = rng.integers(0, tokenizer.vocab_size, (records, SEQ_LEN + 1), np.uint16)
        digest, _ = blocks.write_records(path, iter([tokens]))
        entry = entries.setdefault(domain, {"blocks": 0, "files": []})
        entry["blocks"] += records
        size = path.stat().st_size
        entry["files"].append(
            {"path": path.relative_to(out).as_posix(), "blocks": records, "sha256": digest, "bytes": size}
        )
    identity = {"name": tokenizer.name, "sha256": tokenizer.hash}
    manifest = {"format": manifests.FORMAT, "block": SEQ_LEN + 1, "tokenizer": identity}
    lengths = {
        domain: np.full(entry["blocks"], SEQ_LEN + 1) for domain, entry in entries.items()
    }  # each block is a document
    of_splits = {f"{split}/{domain}": of for split in ("train", "validation") for domain, of in lengths.items()}
    document_index.write(out / document_index.FILE, of_splits)
    write_json(out / "manifest.json", manifest | {"splits": {"train": entries, "validation": entries}})


def read_rates(directory: Path, tokenizer: Tokenizer, *, runs: int, seconds: float) -> list[float]:
    """Return the training iterator's tokens/s, one value per run."""
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
    """Write a shard of the built-in corpus (prose and doctest); random words would tokenise too fast."""
    meta = {"redpajama_set_name": slimpajama.DOMAINS[0].set_name}
    lines, size = [], 0
    for document in extract.documents(extract.distributions()):
        if document.domain in ("prose", "doctest") and size < megabytes * 1e6:
            size += len(document.text)
            lines.append(json.dumps({"text": document.text, "meta": meta}))
    (root / "train").mkdir(parents=True)
    (root / "train" / "text.jsonl.zst").write_bytes(zstandard.compress("\n".join(lines).encode()))


def prepare_rates(source: str, tokenizer: Tokenizer, *, scratch: Path, runs: int) -> list[float]:
    """Return tokens/s of a whole preparation on one core, one value per run."""
    rates = []
    for index in range(runs):
        out = scratch / f"prepared-{index}"
        load_tokenizer.cache_clear()  # also drops the word table, so that every run starts cold
        start = time.perf_counter()
        manifest = prepare.prepare(source, out, tokenizer=tokenizer.name, seq_len=SEQ_LEN, workers=1)
        seconds = time.perf_counter() - start
        tokens = sum(entry["tokens"] for split in manifest["splits"].values() for entry in split.values())
        rates.append(tokens / seconds)
        shutil.rmtree(out)
    return rates


def benchmark(*, quick: bool, source: str = "") -> dict[str, Any]:
    """Measure reading and preparing; return the report."""
    byte = load_tokenizer("byte")
    try:
        vocabulary = load_tokenizer("mixtral")
    except UserError as error:
        print(f"{error}\nMeasuring with bytes.")
        vocabulary = byte
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        files, records, seconds = (2, 2_000, 0.5) if quick else (12, manifests.MAX_RECORDS, 4.0)
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
    metadata = machine() | {"device": platform.processor() or platform.machine()}  # the accelerator is not used
    return {"machine": metadata, "settings": settings, "results": results}


def main(argv: list[str]) -> None:
    """Measure, print a table and write the JSON."""
    args = FLAGS.parse_args(argv)
    written = benchmark(quick=args.quick, source=args.source)
    print(f"{TABLE.header()}   million tokens/s")
    for name, result in written["results"].items():
        print(TABLE.row(name, {**result, "lowest": min(result["runs"])}))
    path = options.destination(args.json, "data", recorded=not (args.quick or args.source))
    report.save(path, written)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
