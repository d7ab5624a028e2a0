"""The corpus of datasets that tensorflow-datasets has prepared: random access to documents, tokenised on the fly.

A domain is a dataset, or one config of it. Its tokens are counted once (`token_counts`); after that a block is a
function of its index (`document_blocks`), and the corpus is read as blocks on disk are, with exact shares of tokens, an
evaluation that is spread over all documents, and a position that belongs to no number of processes or workers.

Validation is the split called validation, or test where there is none, or else a hundredth of the training documents
(`hold_out`). Settings name other splits, and slices of them.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from seqjax.config import DataConfig
from seqjax.data import hold_out, regimes, tfds_datasets, tfds_documents
from seqjax.data.blocks import allow_open_files
from seqjax.data.corpus import BlockCorpus
from seqjax.data.document_blocks import DocumentBlocks
from seqjax.data.token_counts import Counts, counted
from seqjax.data.tokenizer import Tokenizer
from seqjax.files import cache_directory

VALIDATION = ("validation", "test")  # splits that are held out, the first that a dataset has
VERSION = 1  # increment when other tokens are counted, or the order of blocks changes


class _Opener:
    """Turns splits of datasets into blocks, and remembers what they are made of."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, block: int):
        self._config, self._tokenizer, self._block = config, tokenizer, block
        self.digests: dict[str, str] = {}  # of "SPLIT/DOMAIN"
        self.unused = 0  # documents without text
        self._n_files = 0

    def splits(self, domain: str, directory: Path) -> dict[str, DocumentBlocks]:
        """Return the blocks of a domain by what they are to a run, train or validation."""
        config = self._config
        dataset = tfds_documents.Dataset(directory, feature=config.tfds_feature)
        train = dataset.documents(config.tfds_train_split, key="tfds_train_split")
        held_out = config.tfds_validation_split or next((s for s in VALIDATION if s in dataset.splits), "")
        counts, path = self._count(f"train/{domain}", train)
        used = counts.lengths > 0
        if not held_out:
            chosen = counts.hashes[used], counts.lengths[used].astype(np.int64)
            held = used & (counts.hashes < hold_out.limit(*chosen, share=hold_out.SHARE, block=self._block))
            self.digests[f"train/{domain}"] += f" without {hold_out.SHARE}"
            return {
                "train": self._blocks(train, used & ~held, counts, path),
                "validation": self._blocks(train, held, counts, path),
            }
        validation = dataset.documents(held_out, key="tfds_validation_split")
        of_validation, its_path = self._count(f"validation/{domain}", validation)
        return {
            "train": self._blocks(train, used, counts, path),
            "validation": self._blocks(validation, of_validation.lengths > 0, of_validation, its_path),
        }

    def _count(self, key: str, documents: tfds_documents.SplitDocuments) -> tuple[Counts, Path]:
        self._n_files += len(documents.files)
        allow_open_files(self._n_files)  # A reader keeps those open that it has read from.
        content = [VERSION, self._tokenizer.hash, documents.feature, documents.files]
        name = documents.name.translate(str.maketrans("/ ", "--", "[]:%+"))
        file = f"{name}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]}.npz"
        path = cache_directory(self._config.cache_dir) / "tfds" / file
        counts = counted(path, documents, self._tokenizer, workers=self._config.workers)
        self.digests[key] = counts.digest
        self.unused += int((counts.lengths == 0).sum())
        return counts, path

    def _blocks(
        self, documents: tfds_documents.SplitDocuments, chosen: np.ndarray, counts: Counts, path: Path
    ) -> DocumentBlocks:
        return DocumentBlocks(
            documents,
            index=np.flatnonzero(chosen).astype(np.uint32),
            lengths=counts.lengths[chosen],
            tokenizer=self._tokenizer,
            block=self._block,
            counts=str(path),
        )


def open_tfds(config: DataConfig, tokenizer: Tokenizer, *, seq_len: int) -> BlockCorpus:
    """Return the datasets that `config.tfds` names as a corpus; the tokens of those used are counted first.

    Raises:
        UserError: tensorflow-datasets is not installed; a dataset is not prepared, in another file format than
            ArrayRecord, or without the text, the split or enough tokens; or a domain that is asked for is not among
            them.
    """
    tfds_datasets.require()
    root = tfds_datasets.data_directory(config.path)
    found = tfds_datasets.find(config.tfds, root)
    names = ", ".join(config.tfds)
    if len(found) == 1 and not config.train_domains:
        config = dataclasses.replace(
            config, train_domains=tuple(found), eval_domains=config.eval_domains or tuple(found)
        )
    train, evaluate = regimes.choose(
        config, train=found, evaluate=found, where=f"{names} in {root}", fix="build the datasets that hold them"
    )
    opener = _Opener(config, tokenizer, block=seq_len + 1)
    opened = {domain: opener.splits(domain, found[domain]) for domain in dict.fromkeys((*train, *evaluate))}
    sources = {split: {d: splits[split] for d, splits in opened.items()} for split in ("train", "validation")}
    content = {"tokenizer": tokenizer.hash, "block": seq_len + 1, "order": VERSION, "documents": opener.digests}
    without_text = f" {opener.unused:,} documents without text were left out." if opener.unused else ""
    return BlockCorpus(
        name="tfds",
        tokenizer=tokenizer,
        seq_len=seq_len,
        train_domains=train,
        eval_domains=evaluate,
        manifest_hash=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        sources=sources,
        documents={f"{split}/{d}": blocks.lengths for split, of in sources.items() for d, blocks in of.items()},
        weights=config.weights,
        seed=config.seed,
        workers=config.workers,
        note=f"Read from tensorflow-datasets ({names}) and tokenised during the run.{without_text}",
    )
