"""What a training loop sees of the data, whichever way it is stored.

Evaluation reads the same blocks every time: those of the validation split, and for a domain that is not
trained on the validation blocks followed by blocks of its train split, which such a model has not seen
either (some corpora hold out very little of a domain). Where there are more blocks than `max_tokens` allows,
they are spaced evenly.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence

import grain
import numpy as np

from seqjax.data import blocks, ngram, pipeline
from seqjax.data.tokenizer import Tokenizer
from seqjax.errors import UserError

BIGRAM_MAX_VOCAB = 1024
BIGRAM_TRAIN_TOKENS = 16_000_000


class Corpus(abc.ABC):
    """Training and evaluation blocks of a set of domains.

    Attributes:
        name: builtin | blocks | stream.
        train_domains: what is trained on, in the order of the weights.
        eval_domains: what is evaluated, in-domain first.
        in_domain: the evaluated domains that are also trained on.
        tokens: training tokens per training domain; empty where they cannot be known.
        weights: share of the tokens of a batch per training domain, sums to 1.
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
        self.manifest_hash = manifest_hash
        self.tokens = dict(tokens or {})
        self.note = note

    @abc.abstractmethod
    def train_iterator(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> grain.DatasetIterator:
        """Endless batches {"tokens": int32 [batch_size, T+1]}; resumes exactly through Orbax."""

    @abc.abstractmethod
    def eval_blocks(self, domain: str, *, count: int) -> np.ndarray:
        """At most `count` evaluation blocks of a domain, uint16 [n, T+1], at least one."""

    @abc.abstractmethod
    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """At most `count` training blocks of a domain, uint16 [n, T+1]."""

    def eval_batches(self, domain: str, *, batch_size: int, max_tokens: int) -> Iterator[dict[str, np.ndarray]]:
        """{"tokens": int32 [B, T+1], "weights": float32 [B]} in fixed order; weight 0 is a padding row."""
        rows = self.eval_blocks(domain, count=max(1, max_tokens // self.seq_len)).astype(np.int32)
        for start in range(0, len(rows), batch_size):
            tokens = rows[start : start + batch_size]
            weights = np.ones(len(tokens), np.float32)
            padding = batch_size - len(tokens)
            # Padding repeats a real row, so that no token of it can be out of the vocabulary.
            tokens = np.concatenate([tokens, np.repeat(tokens[:1], padding, axis=0)])
            yield {"tokens": tokens, "weights": np.pad(weights, (0, padding))}

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
        evaluation = [self.eval_blocks(d, count=count) for d in self.eval_domains if d in self.in_domain]
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
        weights: Sequence[float] = (),
        seed: int = 0,
        workers: int = 0,
        note: str = "",
    ):
        self._sources, self._seed, self._workers = sources, seed, workers
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
            manifest_hash=manifest_hash,
            tokens=tokens,
            note=note,
        )
        for domain in eval_domains:
            self._eval_sources(domain)

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

    def eval_blocks(self, domain: str, *, count: int) -> np.ndarray:
        """At most `count` evaluation blocks of a domain, uint16 [n, T+1], at least one."""
        picked: list[np.ndarray] = []
        for source in self._eval_sources(domain):
            if count > 0:
                picked.append(_spaced(source, count))
                count -= len(picked[-1])
        return np.concatenate(picked)

    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """At most `count` training blocks of a domain, uint16 [n, T+1], evenly spaced."""
        return _spaced(self._sources["train"][domain], count)

    def _eval_sources(self, domain: str) -> list[blocks.BlockSource]:
        splits = ("validation",) if domain in self.in_domain else ("validation", "train")
        found = [self._sources[s][domain] for s in splits if domain in self._sources.get(s, {})]
        found = [source for source in found if len(source)]
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
    records = [source[i * total // count] for i in range(count)]
    return np.frombuffer(b"".join(records), blocks.DTYPE).reshape(count, -1).astype(np.uint16, copy=False)
