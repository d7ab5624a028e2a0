"""What a training loop sees of the data, whichever way it is stored.

Evaluation reads the same blocks every time: those of the validation split, and for a domain that is not
trained on also those of its train split, which such a model has not seen either (some corpora hold out very
little of a domain). Where there are more blocks than `max_tokens` allows, they are spread over all documents
(`document_index.spread`), in a choice that a seed fixes.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import grain
import numpy as np

from seqjax.data import blocks, document_index, ngram, pipeline
from seqjax.data.tokenizer import Tokenizer
from seqjax.errors import UserError

BIGRAM_MAX_VOCAB = 1024
BIGRAM_TRAIN_TOKENS = 16_000_000


@dataclasses.dataclass(frozen=True)
class EvalBlocks:
    """The evaluation blocks of one domain, n of them.

    Attributes:
        tokens: uint16 [n, T+1].
        index: int64 [n], the place of each among all blocks that the domain could be evaluated on.
        documents: int64 [n], the document that holds most of each block, counted through the domain; where the
            documents are not known, the block itself.
        n_bytes: int64 [n], bytes of UTF-8 that the T predicted tokens of each stand for.
    """

    tokens: np.ndarray
    index: np.ndarray
    documents: np.ndarray
    n_bytes: np.ndarray


class Corpus(abc.ABC):
    """Training and evaluation blocks of a set of domains.

    Attributes:
        name: builtin | blocks | stream.
        train_domains: what is trained on, in the order of the weights.
        eval_domains: what is evaluated, in-domain first.
        in_domain: the evaluated domains that are also trained on.
        tokens: training tokens per training domain; empty where they cannot be known.
        weights: share of the tokens of a batch per training domain, sums to 1.
        natural_shares: how much of the corpus every evaluated domain is, on any scale; weighs domains in a mean.
        manifest_hash: identifies tokenizer and content; losses compare only under equal hashes.
        note: a line to print with the results, may be empty.
    """

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        seq_len: int,
        train_domains: tuple[str, ...],
        eval_domains: tuple[str, ...],
        weights: Mapping[str, float],
        manifest_hash: str,
        natural_shares: Mapping[str, float],
        tokens: Mapping[str, int] | None = None,
        note: str = "",
    ):
        self.name = name
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.train_domains = train_domains
        self.eval_domains = eval_domains
        self.in_domain = frozenset(eval_domains) & frozenset(train_domains)
        self.weights = dict(weights)
        self.natural_shares = dict(natural_shares)
        self.manifest_hash = manifest_hash
        self.tokens = dict(tokens or {})
        self.note = note

    @abc.abstractmethod
    def train_iterator(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> grain.DatasetIterator:
        """Endless batches {"tokens": int32 [batch_size, T+1]}; resumes exactly through Orbax."""

    @abc.abstractmethod
    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        """At most `count` evaluation blocks of a domain, at least one; the same ones for the same `seed`."""

    @abc.abstractmethod
    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """At most `count` training blocks of a domain, uint16 [n, T+1]."""

    def bigram_loss(self, *, max_tokens: int = 262_144) -> float | None:
        """Nats per token of a bigram on the in-domain evaluation blocks; None for large vocabularies.

        Counted on at most 16M training tokens in the shares of `weights`; `max_tokens` is `eval.tokens` of
        the run.
        """
        if self.tokenizer.vocab_size > BIGRAM_MAX_VOCAB or not self.in_domain:
            return None
        budget = BIGRAM_TRAIN_TOKENS // (self.seq_len + 1)
        train = [self.train_sample(d, count=max(1, int(budget * self.weights[d]))) for d in self.train_domains]
        count = max(1, max_tokens // self.seq_len)
        evaluation = [self.eval_blocks(d, count=count).tokens for d in self.eval_domains if d in self.in_domain]
        shuffled = np.random.default_rng(0).permutation(np.concatenate(train))  # held-out part: from all domains
        return ngram.bigram_loss(shuffled, np.concatenate(evaluation), vocab_size=self.tokenizer.vocab_size)


class BlockCorpus(Corpus):
    """A corpus whose blocks lie on disk; `sources` maps split -> domain -> blocks."""

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        seq_len: int,
        train_domains: tuple[str, ...],
        eval_domains: tuple[str, ...],
        manifest_hash: str,
        sources: Mapping[str, Mapping[str, blocks.BlockSource]],
        documents: Mapping[str, np.ndarray],
        weights: Sequence[float] = (),
        seed: int = 0,
        workers: int = 0,
        note: str = "",
    ):
        self._sources, self._documents, self._seed, self._workers = sources, documents, seed, workers
        train = {d: sources.get("train", {}).get(d, ()) for d in train_domains}
        for domain, source in train.items():
            if not len(source):
                raise UserError(
                    f"Domain {domain!r} has fewer than {seq_len + 1} training tokens, one block; prepare "
                    "more of it, lower config.train.seq_len, or leave it out of config.data.train_domains."
                )
        tokens = {domain: len(source) * (seq_len + 1) for domain, source in train.items()}
        super().__init__(
            name=name,
            tokenizer=tokenizer,
            seq_len=seq_len,
            train_domains=train_domains,
            eval_domains=eval_domains,
            weights=pipeline.token_shares(weights or [float(n) for n in tokens.values()], train_domains),
            natural_shares={d: sum(len(split.get(d, ())) for split in sources.values()) for d in eval_domains},
            manifest_hash=manifest_hash,
            tokens=tokens,
            note=note,
        )
        for domain in eval_domains:
            self._eval_splits(domain)

    def train_iterator(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> grain.DatasetIterator:
        """Endless batches {"tokens": int32 [batch_size, T+1]}, shuffled, in exact shares."""
        return pipeline.block_batches(
            {domain: self._sources["train"][domain] for domain in self.train_domains},
            weights=self.weights,
            batch_size=batch_size,
            seed=self._seed,
            workers=self._workers,
            process_index=process_index,
            process_count=process_count,
            content=self.manifest_hash,
        )

    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        """At most `count` evaluation blocks of a domain, spread over its documents."""
        sources, owners, n_documents = [], [], 0
        for split in self._eval_splits(domain):
            source = self._sources[split][domain]
            sources.append(source)
            owners.append(n_documents + self._block_documents(f"{split}/{domain}", len(source)))
            n_documents += len(self._documents.get(f"{split}/{domain}", source))
        documents = np.concatenate(owners)
        index = document_index.spread(documents, count, seed=seed)
        ends = np.cumsum([len(source) for source in sources])
        of_source = np.searchsorted(ends, index, side="right")
        records = [sources[s][int(i - ends[s] + len(sources[s]))] for i, s in zip(index, of_source, strict=True)]
        tokens = _rows(records)
        return EvalBlocks(tokens, index, documents[index], block_bytes(tokens, self.tokenizer))

    def _block_documents(self, key: str, n_blocks: int) -> np.ndarray:
        if key not in self._documents:  # blocks that an older version prepared: each stands for itself
            return np.arange(n_blocks)
        n_tokens = int(self._documents[key].sum(dtype=np.int64))
        if n_tokens // (self.seq_len + 1) != n_blocks:
            raise UserError(
                f"The documents of {key} hold {n_tokens} tokens, its blocks {n_blocks * (self.seq_len + 1)}: "
                f"{document_index.FILE} belongs to other blocks. Delete it, or prepare the data again elsewhere."
            )
        return document_index.block_documents(self._documents[key], block=self.seq_len + 1, n_blocks=n_blocks)

    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """At most `count` training blocks of a domain, uint16 [n, T+1], evenly spaced."""
        return _spaced(self._sources["train"][domain], count)

    def _eval_splits(self, domain: str) -> list[str]:
        splits = ("validation",) if domain in self.in_domain else ("validation", "train")
        found = [split for split in splits if len(self._sources.get(split, {}).get(domain, ()))]
        if not found:
            raise UserError(
                f"Domain {domain!r} has fewer than {self.seq_len + 1} tokens, one block, to evaluate on "
                f"(split {' and '.join(splits)}); lower config.train.seq_len, prepare a source that holds "
                "more of it, or leave it out of config.data.eval_domains."
            )
        return found


def _spaced(source: blocks.BlockSource, count: int) -> np.ndarray:
    total = len(source)
    count = min(count, total)
    return _rows([source[i * total // count] for i in range(count)])


def _rows(records: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(records), blocks.DTYPE).reshape(len(records), -1).astype(np.uint16, copy=False)


def block_bytes(tokens_NT1: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of UTF-8 that the predicted tokens of each block stand for, int64 [n]; marks stand for none."""
    inputs_NT, targets_NT = tokens_NT1[:, :-1], tokens_NT1[:, 1:]
    sizes = tokenizer.n_bytes[targets_NT].sum(axis=1, dtype=np.int64)
    if tokenizer.adds_space:  # the space that the tokenizer puts before a document is not in the text
        sizes -= ((inputs_NT == tokenizer.bos) & (targets_NT != tokenizer.eos)).sum(axis=1)
    return sizes
