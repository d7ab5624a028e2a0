"""Build and open the corpus that needs no download; `extract` collects its text.

Runs train on prose and doctest; math_docs, python and c_code are out of domain. About one package in twenty is held out
whole for in-domain validation, so a package's writing style does not leak. The content depends on the installed
versions of Python and the packages, so losses are comparable only under equal manifest hashes. Use it for first runs
and tests with models up to about ten million parameters; it is not SlimPajama.

The text is tokenised once into a cache directory `builtin-TOKENIZER-KEY`. The directory holds one flat token file per
split and domain, a manifest, and the documents' lengths and sources (their packages). KEY is a hash over everything
that determines the content. The directory is built under a temporary name and renamed, so two processes may build it at
once. Opening compares all files with the manifest and rebuilds a damaged corpus.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from seqjax.config import DataConfig
from seqjax.data import blocks, document_index, document_sources, regimes
from seqjax.data.builtin import extract
from seqjax.data.corpus import BlockCorpus
from seqjax.data.tokenizer import Tokenizer, id_dtype
from seqjax.errors import UserError, first_line
from seqjax.files import cache_directory, replacing, write_json
from seqjax.reading import read_json

VERSION = 1  # increment when the text or its order changes
CONTENT = ("tokenizer", "splits", "version")  # the manifest keys that are hashed
HELD_OUT = 0.05
NOTE = (
    "Built-in corpus: texts of the Python standard library and of installed packages. This is not "
    "SlimPajama; compare losses only under the same manifest hash."
)
REGIMES = {
    "limited": regimes.Regime(train=("prose", "doctest"), eval=extract.DOMAINS),
    "mixed": regimes.Regime(train=extract.DOMAINS, eval=extract.DOMAINS),
}


def open_builtin(config: DataConfig, tokenizer: Tokenizer, *, seq_len: int, recorded: str = "") -> BlockCorpus:
    """Return the built-in corpus in blocks of `seq_len` + 1 tokens.

    If the cache holds a corpus with manifest hash `recorded`, it is opened. Otherwise the corpus for the installed
    packages is opened, and built first if the cache lacks it.
    """
    train, evaluate = regimes.resolve(
        REGIMES[config.regime],
        train=config.train_domains,
        evaluate=config.eval_domains,
        known=extract.DOMAINS,
    )
    dtype = id_dtype(tokenizer.vocab_size)
    directory = _cached(tokenizer, recorded, cache_dir=config.cache_dir) or build(tokenizer, cache_dir=config.cache_dir)
    manifest = read_manifest(directory)
    sources = {
        split: {
            domain: blocks.FlatBlocks(
                str(directory / entry["file"]), tokens=entry["tokens"], block=seq_len + 1, dtype=dtype
            )
            for domain, entry in domains.items()
        }
        for split, domains in manifest["splits"].items()
    }
    return BlockCorpus(
        name="builtin",
        tokenizer=tokenizer,
        seq_len=seq_len,
        train_domains=train,
        eval_domains=evaluate,
        manifest_hash=manifest["hash"],
        sources=sources,
        documents=document_index.read(directory / document_index.FILE),
        document_sources=document_sources.read(directory / document_sources.FILE),
        weights=config.weights,
        seed=config.seed,
        workers=config.workers,
        note=NOTE,
    )


def _cached(tokenizer: Tokenizer, digest: str, *, cache_dir: str) -> Path | None:
    """Return the cached directory with this manifest hash, or None.

    It may belong to package versions that are no longer installed.
    """
    for path in sorted(cache_directory(cache_dir).glob(f"builtin-{tokenizer.name}-*")) if digest else ():
        if not _fault(path, needs_sources=False) and read_manifest(path)["hash"] == digest:
            return path
    return None


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of a corpus directory.

    Raises `UserError` if it is missing or damaged.
    """
    entry = {"file": str, "tokens": int, "documents": int, "sha256": str}
    domains = dict.fromkeys(extract.DOMAINS, entry)
    form = {"hash": str, "tokenizer": str, "version": int, "splits": {"train": domains, "validation": domains}}
    return read_json(directory / "manifest.json", form, fix=f"delete {directory} to rebuild it")


def build(tokenizer: Tokenizer, *, cache_dir: str = "") -> Path:
    """Return the corpus directory for this tokenizer; build it if necessary."""
    root = cache_directory(cache_dir)
    dists = extract.distributions()
    directory = root / f"builtin-{tokenizer.name}-{_key(tokenizer, dists)}"
    if directory.is_dir():
        fault = _fault(directory)
        if not fault:
            return directory
        logging.warning("The built-in corpus in %s is damaged (%s); rebuilding it.", directory, fault)
    logging.info("Building the built-in corpus in %s (about ten seconds, once).", directory)
    documents = extract.documents(dists)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".building-") as temporary:
            content = Path(temporary) / "content"
            content.mkdir()
            _write(content, documents, tokenizer)
            try:
                content.rename(directory)
            except OSError:
                if not _fault(directory):
                    return directory  # Another process built the same content first.
                shutil.rmtree(directory)
                content.rename(directory)
    except OSError as error:
        raise UserError(
            f"Cannot write the built-in corpus to {root} ({error.strerror}; about 60 MB are needed); "
            "set config.data.cache_dir to a writable directory."
        ) from error
    return directory


def _fault(directory: Path, *, needs_sources: bool = True) -> str:
    """Return how a directory differs from the written corpus; "" if it is intact.

    Set `needs_sources` to False for corpora from earlier versions, which wrote no sources.
    """
    try:
        manifest = read_manifest(directory)
        lengths = document_index.read(directory / document_index.FILE)
        sources = document_sources.read(directory / document_sources.FILE)
        if needs_sources and not sources:
            return f"{document_sources.FILE} is missing"
        if manifest["hash"] != _digest({key: manifest[key] for key in CONTENT}):
            return "manifest.json differs from the written file"
        for split, domains in manifest["splits"].items():
            for domain, entry in domains.items():
                if _sha256(directory / entry["file"]) != entry["sha256"]:
                    return f"{entry['file']} differs from the written file"
                of_domain = lengths[f"{split}/{domain}"]
                if (len(of_domain), int(of_domain.sum())) != (entry["documents"], entry["tokens"]):
                    return f"{document_index.FILE} belongs to other text"
                if sources:
                    sources.take(f"{split}/{domain}", "iu", entry["documents"])
    except (OSError, KeyError, UserError) as error:
        return first_line(error)
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def held_out_packages(documents: list[extract.Document]) -> frozenset[str]:
    """Return the packages held out for validation.

    Their documents are about 5 % of the prose domain and of the doctest domain.
    """
    domains = REGIMES["limited"].train
    total = dict.fromkeys(domains, 0)
    sizes: dict[str, dict[str, int]] = {}
    for document in documents:
        if document.domain in total:
            total[document.domain] += len(document.text)
            per_domain = sizes.setdefault(document.package, dict.fromkeys(domains, 0))
            per_domain[document.domain] += len(document.text)
    held: set[str] = set()
    held_sizes = dict.fromkeys(domains, 0)
    for package in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        share = {d: sizes[package][d] / max(1, total[d]) for d in domains}
        is_needed = any(share[d] > 0 and held_sizes[d] < HELD_OUT * total[d] for d in domains)
        fits = all(held_sizes[d] + sizes[package][d] <= 1.5 * HELD_OUT * total[d] for d in domains)
        if is_needed and fits:
            held.add(package)
            for domain in domains:
                held_sizes[domain] += sizes[package][domain]
    return frozenset(held)


def _write(directory: Path, documents: list[extract.Document], tokenizer: Tokenizer) -> None:
    held = held_out_packages(documents)
    limited = REGIMES["limited"].train
    splits: dict[str, dict[str, Any]] = {"train": {}, "validation": {}}
    lengths: dict[str, np.ndarray] = {}
    indices: dict[str, np.ndarray] = {}
    names = {domain: document_sources.Names() for domain in extract.DOMAINS}
    for domain in extract.DOMAINS:
        members = [d for d in documents if d.domain == domain]
        for split in splits:
            if domain in limited:
                chosen = [d for d in members if (d.package in held) == (split == "validation")]
            else:
                chosen = [d for i, d in enumerate(members) if (i % 2 == 0) == (split == "validation")]
            dtype = id_dtype(tokenizer.vocab_size)
            bos, eos = np.array([tokenizer.bos], dtype), np.array([tokenizer.eos], dtype)
            pieces = [np.empty(0, dtype)]
            for ids in tokenizer.encode_batch([d.text for d in chosen]):
                pieces += [bos, ids, eos]
            stream = np.concatenate(pieces)
            lengths[f"{split}/{domain}"] = np.array([len(ids) + 2 for ids in pieces[2::3]])
            indices[f"{split}/{domain}"] = np.array([names[domain].index(d.package) for d in chosen])
            file = f"{split}-{domain}.{dtype.name}"
            with replacing(directory / file) as to_file:  # written to disk before the directory is renamed
                to_file.write(stream.astype(dtype).tobytes())
            splits[split][domain] = {
                "file": file,
                "documents": len(chosen),
                "bytes": sum(len(d.text.encode("utf-8", "replace")) for d in chosen),
                "tokens": len(stream),
                "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
            }
    content = {"tokenizer": tokenizer.hash, "splits": splits, "version": VERSION}
    document_index.write(directory / document_index.FILE, lengths)
    document_sources.write(directory / document_sources.FILE, indices, names)
    about = content | {"hash": _digest(content), "held_out": sorted(held)}
    write_json(directory / "manifest.json", about, sort_keys=True)


def _key(tokenizer: Tokenizer, dists: dict[str, metadata.Distribution]) -> str:
    versions = {name: dist.version for name, dist in dists.items()}
    # The sources file is in the key, so a directory from a version without sources is not reused.
    content = [VERSION, tokenizer.hash, sys.version, versions, extract.CAPS, document_sources.FILE]
    return _digest(content)[:12]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
