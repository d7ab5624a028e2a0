"""The interface between the training loop and the data, however the data is stored.

Evaluation always reads the same blocks, those of the validation split. For a domain outside training its train split is
added, which the model has not seen either (some corpora hold out very little of a domain). If there are more blocks
than requested, the chosen blocks are spread over all documents (`document_index.spread`); the choice depends only on a
seed.

The baseline of a demo run is a smoothed bigram, counted on training blocks and tested on evaluation blocks:
p(b | a) = (c(a, b) + k p(b)) / (c(a) + k), interpolated with the unigram p(b) = (c(b) + 1) / (N + V). The strength k is
the best of a small grid on the last tenth of the training blocks, with counts of the rest; then all blocks are counted.
The first token of a block is not predicted, as for the model.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from seqjax.data import blocks, document_index, document_sources, pipeline
from seqjax.data.bigram import bigram_loss
from seqjax.data.tokenizer import Tokenizer, id_dtype
from seqjax.errors import UserError
from seqjax.reading import Arrays

BIGRAM_MAX_VOCAB = 1024
BIGRAM_TRAIN_TOKENS = 16_000_000
RATE_TOKENS = 4096 * 2049  # of a training domain, on which the rates of its tokens are counted


@dataclasses.dataclass(frozen=True)
class EvalBlocks:
    """The evaluation blocks of one domain, n of them.

    Attributes:
        tokens: uint16 [n, T+1], or uint32 if the vocabulary needs it (`tokenizer.id_dtype`).
        index: int64 [n], the index of each block among all blocks that the domain could be evaluated on.
        documents: int64 [n], the index within the domain of the document that holds most of each block.
        n_bytes: int64 [n], the UTF-8 bytes of the T predicted tokens of each block.
        sources: int64 [n], the source of that document (`document_sources.numbers`); None if no source is known.
    """

    tokens: np.ndarray
    index: np.ndarray
    documents: np.ndarray
    n_bytes: np.ndarray
    sources: np.ndarray | None = None


class Corpus(abc.ABC):
    """Training and evaluation blocks of a set of domains.

    Attributes:
        name: builtin | blocks | stream | tfds.
        train_domains: The domains that are trained on, in the order of the weights.
        eval_domains: The domains that are evaluated, in-domain ones first.
        in_domain: The evaluated domains that are also trained on.
        tokens: Number of training tokens per training domain; empty if it cannot be known.
        weights: Share of each training domain in the tokens of a batch; the shares sum to 1.
        natural_shares: Size of every evaluated domain in the corpus, on any scale; the weights of a mean over domains.
        manifest_hash: Identifies tokenizer and content; losses are comparable only under equal hashes.
        note: A line to print with the results; may be empty.
        test_sets: Identifies the content of every test set, by its name, as `manifest_hash` does that of the corpus.
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
        test_sets: Mapping[str, str] | None = None,
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
        self.test_sets = dict(test_sets or {})

    def side(self, domain: str) -> str:
        """Return the role of an evaluated domain: in domain, out of domain or test set."""
        if domain in self.in_domain:
            return "in domain"
        return "out of domain" if domain in self.natural_shares else "test set"

    @abc.abstractmethod
    def train_iterator(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> pipeline.TrainIterator:
        """Return an endless iterator of {"tokens": int32 [batch_size, T+1]}, which resumes exactly through Orbax."""

    @abc.abstractmethod
    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        """Return between 1 and `count` evaluation blocks of a domain, the same ones for the same `seed`."""

    @abc.abstractmethod
    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """Return at most `count` training blocks of a domain, ids [n, T+1]."""

    def token_rates(self) -> np.ndarray | None:
        """Return how often each id occurs in training, per million tokens, float64 [vocab_size].

        The count uses blocks spread evenly over each training domain, at most 8.4M tokens per domain, weighted by
        `weights`. None where this would require tokenising text.
        """
        return None

    def bigram_loss(self, *, max_tokens: int = 262_144) -> float | None:
        """Return a bigram's loss on the in-domain evaluation blocks in nats per token; None for large vocabularies.

        It is counted on at most 16M training tokens in the shares of `weights`; `max_tokens` is the run's
        `eval.tokens`.
        """
        if self.tokenizer.vocab_size > BIGRAM_MAX_VOCAB or not self.in_domain:
            return None
        budget = BIGRAM_TRAIN_TOKENS // (self.seq_len + 1)
        train = [self.train_sample(d, count=max(1, int(budget * self.weights[d]))) for d in self.train_domains]
        count = max(1, max_tokens // self.seq_len)
        evaluation = [self.eval_blocks(d, count=count).tokens for d in self.eval_domains if d in self.in_domain]
        # Shuffled so that the held-out tenth contains all domains.
        shuffled = np.random.default_rng(0).permutation(np.concatenate(train))
        return bigram_loss(shuffled, np.concatenate(evaluation), vocab_size=self.tokenizer.vocab_size)


class BlockCorpus(Corpus):
    """A corpus whose blocks are read by their index.

    `sources` maps split -> domain -> blocks. `document_sources` are the arrays of sources.npz, if there is this file.
    """

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
        document_sources: Arrays | None = None,
        weights: Sequence[float] = (),
        seed: int = 0,
        workers: int = 0,
        note: str = "",
    ):
        self._sources, self._documents, self._seed, self._workers = sources, documents, seed, workers
        self._document_sources = document_sources
        self._dtype = id_dtype(tokenizer.vocab_size)
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
    ) -> pipeline.TrainIterator:
        """Return an endless iterator of {"tokens": int32 [batch_size, T+1]}, shuffled, with exact domain shares."""
        return pipeline.block_batches(
            {domain: self._sources["train"][domain] for domain in self.train_domains},
            weights=self.weights,
            batch_size=batch_size,
            seed=self._seed,
            workers=self._workers,
            process_index=process_index,
            process_count=process_count,
            content=self.manifest_hash,
            dtype=self._dtype,
        )

    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        """Return at most `count` evaluation blocks of a domain, spread over its documents."""
        sources, owners, counts = [], [], {}
        for split in self._eval_splits(domain):
            source = self._sources[split][domain]
            sources.append(source)
            owners.append(sum(counts.values()) + self._block_documents(f"{split}/{domain}", len(source)))
            counts[f"{split}/{domain}"] = len(self._documents.get(f"{split}/{domain}", ()))
        documents = np.concatenate(owners)
        index = document_index.spread(documents, count, seed=seed)
        ends = np.cumsum([len(source) for source in sources])
        of_source = np.searchsorted(ends, index, side="right")
        records = [sources[s][int(i - ends[s] + len(sources[s]))] for i, s in zip(index, of_source, strict=True)]
        tokens = _rows(records, self._dtype)
        of_block = documents[index]
        of_source = None
        if self._document_sources is not None:
            names = document_sources.names_of(self._document_sources, domain, counts, of_block)
            of_source = document_sources.numbers(names, of_block)
        return EvalBlocks(tokens, index, of_block, block_bytes(tokens, self.tokenizer), of_source)

    def _block_documents(self, key: str, n_blocks: int) -> np.ndarray:
        lengths = self._documents.get(key, np.empty(0, np.int64))
        n_tokens = int(lengths.sum(dtype=np.int64))
        if n_tokens // (self.seq_len + 1) != n_blocks:
            raise UserError(
                f"The documents of {key} hold {n_tokens} tokens, its blocks {n_blocks * (self.seq_len + 1)}: "
                f"{document_index.FILE} belongs to other blocks. Prepare the data again into another directory."
            )
        return document_index.block_documents(lengths, block=self.seq_len + 1, n_blocks=n_blocks)

    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """Return at most `count` training blocks of a domain, ids [n, T+1], evenly spaced."""
        return _spaced(self._sources["train"][domain], count, self._dtype)

    def token_rates(self) -> np.ndarray | None:
        """Return how often each id occurs in training, per million tokens, float64 [vocab_size]."""
        rates, count = np.zeros(self.tokenizer.vocab_size), max(1, RATE_TOKENS // (self.seq_len + 1))
        for domain in self.train_domains:
            counts = np.bincount(self.train_sample(domain, count=count).ravel(), minlength=len(rates))
            rates += 1e6 * self.weights[domain] * counts / counts.sum()
        return rates

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


def _spaced(source: blocks.BlockSource, count: int, dtype: np.dtype) -> np.ndarray:
    total = len(source)
    count = min(count, total)
    return _rows([source[i * total // count] for i in range(count)], dtype)


def _rows(records: Sequence[bytes], dtype: np.dtype) -> np.ndarray:
    native = dtype.newbyteorder("=")
    return np.frombuffer(b"".join(records), dtype).reshape(len(records), -1).astype(native, copy=False)


def block_bytes(tokens_NT1: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the number of UTF-8 bytes of each block's predicted tokens, int64 [n]; special tokens count 0."""
    inputs_NT, targets_NT = tokens_NT1[:, :-1], tokens_NT1[:, 1:]
    sizes = tokenizer.n_bytes[targets_NT].sum(axis=1, dtype=np.int64)
    if tokenizer.adds_space:  # The space that the tokenizer puts before a document is not in the text.
        sizes -= ((inputs_NT == tokenizer.bos) & (targets_NT != tokenizer.eos)).sum(axis=1)
    return sizes
