"""Define the interface between training loop and data, for any storage form.

Evaluation always uses the same blocks, taken from the validation split. For OOD domains it adds the train split, which
the model has not seen either; some corpora hold out little text per domain. If there are more blocks than requested,
the selection covers all documents evenly (`document_index.spread`) and depends only on a seed.

The baseline for demo runs is a smoothed bigram, counted on training blocks and tested on evaluation blocks:

    p(b | a) = (c(a, b) + k p(b)) / (c(a) + k),    p(b) = (c(b) + 1) / (N + V)

The strength k comes from a small grid: it minimises the loss on the last tenth of the training blocks, with counts from
the rest. All training blocks are then counted. As for the model, the first token in a block is not predicted.
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
RATE_TOKENS = 4096 * 2049  # tokens per training domain used to count token rates


@dataclasses.dataclass(frozen=True)
class EvalBlocks:
    """The n evaluation blocks of one domain.

    Attributes:
        tokens: uint16 [n, T+1], or uint32 if the vocabulary needs it (`tokenizer.id_dtype`).
        index: int64 [n], the index of each block among all blocks available to evaluate the domain.
        documents: int64 [n], the document that holds most tokens of each block, as an index within the domain.
        n_bytes: int64 [n], the UTF-8 bytes of the T predicted tokens in each block.
        sources: int64 [n], that document's source (`document_sources.numbers`); None if no source is known.
    """

    tokens: np.ndarray
    index: np.ndarray
    documents: np.ndarray
    n_bytes: np.ndarray
    sources: np.ndarray | None = None


class Corpus(abc.ABC):
    """Training and evaluation blocks for a set of domains.

    Attributes:
        name: builtin | blocks | stream | tfds.
        train_domains: The training domains, in the order of the weights.
        eval_domains: The evaluated domains, in-domain ones first.
        in_domain: The evaluated domains that are also training domains.
        tokens: Number of training tokens per training domain; empty if unknown.
        weights: Token share of each training domain in a batch; the shares sum to 1.
        natural_shares: Size of every evaluated domain in the corpus, on any scale; used to weight a mean over domains.
        manifest_hash: Identifies tokenizer and content; losses are comparable only if the hashes are equal.
        note: A line to print with the results; may be empty.
        test_sets: Content hash per test set name, analogous to `manifest_hash`.
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
        """Return an evaluated domain's role: in domain, out of domain or test set."""
        if domain in self.in_domain:
            return "in domain"
        return "out of domain" if domain in self.natural_shares else "test set"

    @abc.abstractmethod
    def train_iterator(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> pipeline.TrainIterator:
        """Return an endless iterator of {"tokens": int32 [batch_size, T+1]}.

        The iterator resumes exactly through Orbax.
        """

    @abc.abstractmethod
    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        """Return between 1 and `count` evaluation blocks of a domain.

        Equal seeds give equal blocks.
        """

    @abc.abstractmethod
    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """Return at most `count` training blocks of a domain, ids [n, T+1]."""

    def token_rates(self) -> np.ndarray | None:
        """Return each id's training frequency per million tokens, float64 [vocab_size].

        The count uses evenly spaced blocks from each training domain, at most 8.4M tokens per domain, weighted by
        `weights`. Returns None if counting would require tokenising text.
        """
        return None

    def bigram_loss(self, *, max_tokens: int = 262_144) -> float | None:
        """Return a bigram's in-domain evaluation loss in nats per token.

        The bigram is counted on at most 16M training tokens, in the shares `weights`. `max_tokens` is the run's
        `eval.tokens`. Returns None if the vocabulary exceeds `BIGRAM_MAX_VOCAB` or no domain is in-domain.
        """
        if self.tokenizer.vocab_size > BIGRAM_MAX_VOCAB or not self.in_domain:
            return None
        budget = BIGRAM_TRAIN_TOKENS // (self.seq_len + 1)
        train = [self.train_sample(d, count=max(1, int(budget * self.weights[d]))) for d in self.train_domains]
        count = max(1, max_tokens // self.seq_len)
        evaluation = [self.eval_blocks(d, count=count).tokens for d in self.eval_domains if d in self.in_domain]
        # Shuffle, or the held-out tenth would not contain all domains.
        shuffled = np.random.default_rng(0).permutation(np.concatenate(train))
        return bigram_loss(shuffled, np.concatenate(evaluation), vocab_size=self.tokenizer.vocab_size)


class BlockCorpus(Corpus):
    """A corpus with random access to its blocks.

    `sources` maps split -> domain -> blocks. `document_sources` holds the arrays in sources.npz, if the file exists.
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
                    f"Domain {domain!r} has less than one training block of {seq_len + 1} tokens; lower "
                    "config.train.seq_len, or leave the domain out of config.data.train_domains."
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
        """Return an endless shuffled iterator of {"tokens": int32 [batch_size, T+1]}.

        Domain shares are exact.
        """
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
        """Return at most `count` evaluation blocks, spread over the domain's documents."""
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
                f"{document_index.FILE} belongs to other blocks: the {key} documents have {n_tokens} tokens, its "
                f"blocks {n_blocks * (self.seq_len + 1)}. Prepare the data again into another directory."
            )
        return document_index.block_documents(lengths, block=self.seq_len + 1, n_blocks=n_blocks)

    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """Return at most `count` evenly spaced training blocks, ids [n, T+1]."""
        return _spaced(self._sources["train"][domain], count, self._dtype)

    def token_rates(self) -> np.ndarray | None:
        """Return each id's training frequency per million tokens, float64 [vocab_size]."""
        rates, count = np.zeros(self.tokenizer.vocab_size), max(1, RATE_TOKENS // (self.seq_len + 1))
        for domain in self.train_domains:
            counts = np.bincount(self.train_sample(domain, count=count).ravel(), minlength=len(rates))
            rates += 1e6 * self.weights[domain] * counts / counts.sum()
        return rates

    def _eval_splits(self, domain: str) -> list[str]:
        splits = ("validation",) if domain in self.in_domain else ("validation", "train")
        nonempty = [split for split in splits if len(self._sources.get(split, {}).get(domain, ()))]
        if not nonempty:
            more = "prepare more text into another --out (--validation=0.1 holds out a tenth)"
            fix = "lower config.train.seq_len" if self.name == "builtin" else more
            raise UserError(
                f"Domain {domain!r} has no block of {self.seq_len + 1} tokens for evaluation (split "
                f"{' and '.join(splits)}); {fix}, or leave the domain out of config.data.eval_domains."
            )
        return nonempty


def _spaced(source: blocks.BlockSource, count: int, dtype: np.dtype) -> np.ndarray:
    total = len(source)
    count = min(count, total)
    return _rows([source[i * total // count] for i in range(count)], dtype)


def _rows(records: Sequence[bytes], dtype: np.dtype) -> np.ndarray:
    native = dtype.newbyteorder("=")
    return np.frombuffer(b"".join(records), dtype).reshape(len(records), -1).astype(native, copy=False)


def block_bytes(tokens_NT1: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the UTF-8 bytes of each block's predicted tokens, int64 [n].

    Special tokens count as 0 bytes.
    """
    inputs_NT, targets_NT = tokens_NT1[:, :-1], tokens_NT1[:, 1:]
    sizes = tokenizer.n_bytes[targets_NT].sum(axis=1, dtype=np.int64)
    if tokenizer.adds_space:  # The text does not contain the space that the tokenizer prepends.
        sizes -= ((inputs_NT == tokenizer.bos) & (targets_NT != tokenizer.eos)).sum(axis=1)
    return sizes
