"""Open the configured corpus and test sets, and check that they fit the config.

Test sets are directories of prepared blocks that are evaluated and never trained on (`config.eval.path`). Their domains
are named `SET.DOMAIN`, where SET is the directory name. Evaluation may use all their blocks, including the train split.
Recorded means exclude test sets, so runs with different test sets stay comparable.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax import store
from seqjax.config import DataConfig
from seqjax.data import block_cache, blocks, document_index, document_sources, regimes, stored_tokenizer
from seqjax.data.builtin import open_builtin
from seqjax.data.corpus import BlockCorpus, Corpus, EvalBlocks
from seqjax.data.manifests import manifest_hash, read_manifest
from seqjax.data.pipeline import TrainIterator
from seqjax.data.stream import StreamCorpus
from seqjax.data.tokenizer import Tokenizer, load_tokenizer
from seqjax.errors import MissingPackageError, UserError


class TestedCorpus(Corpus):
    """A corpus with additional evaluated domains from test sets.

    Training does not change. Without a corpus, only the test sets can be evaluated and nothing can be trained on.
    """

    __test__ = False  # pytest would otherwise collect a class with this name

    def __init__(self, corpus: Corpus | None, sets: Mapping[str, Corpus]):
        corpus_domains = corpus.eval_domains if corpus is not None else ()
        shares = corpus.natural_shares if corpus is not None else {}
        corpus = corpus if corpus is not None else next(iter(sets.values()))
        self._corpus = corpus
        self._of_set = {f"{name}.{domain}": (s, domain) for name, s in sets.items() for domain in s.eval_domains}
        super().__init__(
            name=corpus.name,
            tokenizer=corpus.tokenizer,
            seq_len=corpus.seq_len,
            train_domains=corpus.train_domains,
            eval_domains=(*corpus_domains, *self._of_set),
            weights=corpus.weights,
            manifest_hash=corpus.manifest_hash,
            natural_shares=shares,
            tokens=corpus.tokens,
            note=corpus.note,
            test_sets={name: s.manifest_hash for name, s in sets.items()},
        )

    def train_iterator(self, *, batch_size: int, process_index: int = 0, process_count: int = 1) -> TrainIterator:
        """Return the corpus's iterator."""
        return self._corpus.train_iterator(
            batch_size=batch_size, process_index=process_index, process_count=process_count
        )

    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        """Return evaluation blocks for a corpus domain or for `SET.DOMAIN`."""
        corpus, domain = self._of_set.get(domain, (self._corpus, domain))
        return corpus.eval_blocks(domain, count=count, seed=seed)

    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """Return at most `count` training blocks of a domain, ids [n, T+1]."""
        return self._corpus.train_sample(domain, count=count)

    def token_rates(self) -> np.ndarray | None:
        """Return the corpus's token rates; test sets are not training data."""
        return self._corpus.token_rates()


def set_names(paths: Sequence[str]) -> dict[str, str]:
    """Return each test set's directory or URL, keyed by set name.

    Raises `UserError` if two sets have the same name.
    """
    named: dict[str, str] = {}
    for path in map(str, map(store.location, paths)):
        name = store.url_of(path).rpartition("/")[2] or Path(path).resolve().name
        if name in named:
            raise UserError(
                f"config.eval.path (--data of evaluate): {named[name]} and {path} are both named {name!r}, and a "
                "domain is named after its set; rename one of the directories."
            )
        named[name] = path
    return named


def open_corpus(
    config: DataConfig, *, seq_len: int, vocab_size: int, test_sets: Sequence[str] = (), recorded: str = ""
) -> Corpus:
    """Return the corpus of `config`, in blocks of `seq_len` + 1 tokens.

    All ids are below `vocab_size`.

    Args:
        config: The data settings.
        seq_len: T; blocks hold T + 1 tokens.
        vocab_size: The model's vocabulary size.
        test_sets: Directories of prepared blocks that are also evaluated (`config.eval.path`).
        recorded: The manifest hash of a resumed run. If the cache has the built-in corpus with this hash, it is used
            even if the installed packages, and therefore the text, have changed.

    Raises:
        UserError: The data is missing or empty, lacks a domain, or was prepared with another tokenizer or block length,
            or the tokenizer has more ids than `vocab_size`.
    """
    config = _located(config)
    tokenizer = _tokenizer(config, vocab_size=vocab_size)
    if config.corpus == "builtin":
        corpus: Corpus = open_builtin(config, tokenizer, seq_len=seq_len, recorded=recorded)
    elif config.corpus == "blocks":
        corpus = _open_blocks(config, tokenizer, seq_len=seq_len)
    else:
        corpus = StreamCorpus(config, tokenizer, seq_len=seq_len)
    if not test_sets:
        return corpus
    return TestedCorpus(corpus, _open_test_sets(config, tokenizer, test_sets, seq_len=seq_len))


def open_test_sets(config: DataConfig, paths: Sequence[str], *, seq_len: int, vocab_size: int) -> Corpus:
    """Return only the test sets, without a training corpus.

    Raises `UserError` as `open_corpus` does.
    """
    config = _located(dataclasses.replace(config, corpus="blocks", path=paths[0]))
    tokenizer = _tokenizer(config, vocab_size=vocab_size)
    return TestedCorpus(None, _open_test_sets(config, tokenizer, paths, seq_len=seq_len))


def _located(config: DataConfig) -> DataConfig:
    """Return `config` with its paths in the form that every library reads alike."""
    paths = {name: getattr(config, name) for name in ("path", "tokenizer_path", "cache_dir")}
    return dataclasses.replace(config, **{name: str(store.location(path)) for name, path in paths.items() if path})


def _tokenizer(config: DataConfig, *, vocab_size: int) -> Tokenizer:
    tokenizer = _load_tokenizer(config)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"The {tokenizer.name} tokenizer has {tokenizer.vocab_size} ids, config.model.vocab_size is "
            f"{vocab_size}; set config.model.vocab_size to at least {tokenizer.vocab_size}, or change "
            "config.data.tokenizer."
        )
    return tokenizer


def document_ids(config: DataConfig, tokenizer: Tokenizer | None = None) -> tuple[int, int] | None:
    """Return the ids (BOS, EOS) at which a model restarts, or None without `data.reset`.

    The tokenizer is loaded if it is not given.
    """
    if not config.reset:
        return None
    tokenizer = tokenizer or _load_tokenizer(config)
    return tokenizer.bos, tokenizer.eos


def _load_tokenizer(config: DataConfig) -> Tokenizer:
    """Return the configured tokenizer.

    If its package is not installed, the tokenizer file stored with prepared blocks is used; it only counts bytes.
    """
    try:
        return load_tokenizer(config.tokenizer, config.tokenizer_path)
    except MissingPackageError as error:
        if config.corpus != "blocks":
            raise
        manifest = read_manifest(config.path)  # Missing blocks are reported before a missing package.
        path = block_cache.small_files(config.path, manifest, cache_dir=config.cache_dir) / stored_tokenizer.FILE
        if not path.is_file():
            raise
        stored = stored_tokenizer.read(path, why=str(error))
        if stored.name != config.tokenizer or not stored.is_of(config.tokenizer_path):
            raise
        return stored


def _open_blocks(config: DataConfig, tokenizer: Tokenizer, *, seq_len: int) -> Corpus:
    manifest = _manifest(config, tokenizer, seq_len=seq_len)
    present = {split: {d for d, e in domains.items() if e["blocks"]} for split, domains in manifest["splits"].items()}
    in_train, in_validation = (present.get(split, set()) for split in ("train", "validation"))
    train, evaluate = regimes.choose(
        config,
        train=in_train,
        evaluate=in_train | in_validation,
        where=config.path,
        fix="prepare a source that has them",
    )
    return _block_corpus(config, tokenizer, manifest, seq_len=seq_len, train=train, evaluate=evaluate)


def _open_test_sets(
    config: DataConfig, tokenizer: Tokenizer, paths: Sequence[str], *, seq_len: int
) -> dict[str, Corpus]:
    return {
        name: _open_test_set(dataclasses.replace(config, path=str(path)), tokenizer, seq_len=seq_len)
        for name, path in set_names(paths).items()
    }


def _open_test_set(config: DataConfig, tokenizer: Tokenizer, *, seq_len: int) -> Corpus:
    """Return the blocks in `config.path` as a corpus without training domains.

    Every domain that has blocks is evaluated.
    """
    manifest = _manifest(config, tokenizer, seq_len=seq_len)
    splits = manifest["splits"]
    present = sorted({d for domains in splits.values() for d, entry in domains.items() if entry["blocks"]})
    if not present:
        raise UserError(f"config.eval.path: {config.path} holds no block of {seq_len + 1} tokens; prepare longer text.")
    config = dataclasses.replace(config, weights=())
    return _block_corpus(config, tokenizer, manifest, seq_len=seq_len, train=(), evaluate=tuple(present))


def _manifest(config: DataConfig, tokenizer: Tokenizer, *, seq_len: int) -> dict[str, Any]:
    """Return the manifest of the blocks in `config.path`.

    Raises `UserError` if the blocks do not fit the config.
    """
    manifest = read_manifest(config.path)
    made = manifest["tokenizer"]
    tokenizer_path = f" --tokenizer_path={config.tokenizer_path}" if config.tokenizer_path else ""
    options = f"--tokenizer={config.tokenizer}{tokenizer_path} --seq_len={seq_len}"
    again = f"prepare again into another directory with {options}"
    if made["sha256"] != tokenizer.hash:
        raise UserError(
            f"The blocks in {config.path} were made with the {made['name']} tokenizer (sha256 "
            f"{made['sha256'][:12]}), the config says {tokenizer.name} ({tokenizer.hash[:12]}); set "
            f"config.data.tokenizer={made['name']!r} or {again}."
        )
    if manifest["block"] != seq_len + 1:
        raise UserError(
            f"The blocks in {config.path} hold {manifest['block']} tokens, config.train.seq_len={seq_len} "
            f"needs {seq_len + 1}; set config.train.seq_len={manifest['block'] - 1} or {again}."
        )
    return manifest


def _block_corpus(
    config: DataConfig,
    tokenizer: Tokenizer,
    manifest: dict[str, Any],
    *,
    seq_len: int,
    train: tuple[str, ...],
    evaluate: tuple[str, ...],
) -> Corpus:
    used = {*train, *evaluate}
    directory = block_cache.copied(config.path, manifest, used, cache_dir=config.cache_dir)
    sources = blocks.open_records(directory, manifest, domains=used, vocab_size=tokenizer.vocab_size)
    return BlockCorpus(
        name="blocks",
        tokenizer=tokenizer,
        seq_len=seq_len,
        train_domains=train,
        eval_domains=evaluate,
        manifest_hash=manifest_hash(manifest),
        sources=sources,
        documents=document_index.read(directory / document_index.FILE),
        document_sources=document_sources.read(directory / document_sources.FILE),
        weights=config.weights,
        seed=config.seed,
        workers=config.workers,
    )
