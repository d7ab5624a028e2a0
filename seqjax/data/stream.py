"""Training directly from `*.jsonl.zst` shards: they are read, tokenised, packed and mixed during the run.

Each training domain has its own reader: the order of the shards is shuffled per epoch, the documents of a shard are
shuffled within windows of 1,024 lines, and BOS + document + EOS are concatenated and cut into blocks of T + 1 tokens.
Blocks are then mixed in the token shares. A row of another domain is recognised by a pattern and dropped before it is
parsed. `seqjax.data.stream_reader` describes the position of a reader and how it resumes.

Readers are divided over processes and workers by shard if there are enough of them, otherwise by document. This
division determines the order, so a checkpoint cannot be resumed with another number of processes or workers.

Natural shares cannot be counted in advance: without weights, SlimPajama's published ones are used. For
long runs or uneven mixtures, prepare blocks: they are shuffled globally and need a tenth of the CPU
time.
"""

import hashlib
from collections.abc import Sequence

import grain
import numpy as np

from seqjax.config import DataConfig
from seqjax.data import document_index, pipeline, regimes, shards, slimpajama
from seqjax.data.corpus import Corpus, EvalBlocks, block_bytes
from seqjax.data.stream_reader import DomainBlocks, Reader
from seqjax.data.tokenizer import Tokenizer, id_dtype, with_specials
from seqjax.errors import UserError

PREFETCH_BATCHES = 4


class StreamCorpus(Corpus):
    """A corpus of shards that are tokenised while they are read."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, seq_len: int):
        train, evaluate = regimes.resolve(
            regimes.REGIMES[config.regime],
            train=config.train_domains,
            evaluate=config.eval_domains,
            known=slimpajama.NAMES,
        )
        self._shards = shards.find_shards(config.path)
        self._seed, self._workers = config.seed, config.workers
        self._read: dict[tuple[str, str], tuple[int, np.ndarray, np.ndarray]] = {}  # requested count, blocks, documents
        weights = config.weights or [slimpajama.SHARES[domain] for domain in train]
        listing = [(shard.name, shard.split, shard.size) for shard in self._shards]
        super().__init__(
            name="stream",
            tokenizer=tokenizer,
            seq_len=seq_len,
            train_domains=train,
            eval_domains=evaluate,
            weights=pipeline.token_shares(weights, train),
            natural_shares={domain: slimpajama.SHARES[domain] for domain in evaluate},
            manifest_hash=hashlib.sha256(repr((listing, tokenizer.hash, seq_len)).encode()).hexdigest(),
            note="Streamed: shares of the domains are SlimPajama's published ones unless weights are given.",
        )
        for domain in train:
            self.train_sample(domain, count=1)
        for domain in evaluate:
            self.eval_blocks(domain, count=1)

    def train_iterator(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> pipeline.TrainIterator:
        """Return an endless iterator of {"tokens": int32 [batch_size, T+1]}, which resumes exactly through Orbax."""
        readers = [
            DomainBlocks(
                Reader(
                    files=self._candidates("train", domain),
                    domain=domain,
                    tokenizer=self.tokenizer,
                    block=self.seq_len + 1,
                    seed=self._seed,
                    part=process_index,
                    parts=process_count,
                )
            )
            for domain in self.train_domains
        ]
        shares = [float(p) for p in pipeline.proportions(list(self.weights.values()))]
        mixed = grain.IterDataset.mix(readers, shares) if len(readers) > 1 else readers[0]
        batches = mixed.batch(batch_size, batch_fn=_to_batch)
        if self._workers == 0:
            batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=PREFETCH_BATCHES)
        return pipeline.StreamIterator(
            iter(pipeline.with_workers(batches, self._workers)),
            # Each process and worker reads its own shards, so the place in them belongs to their number.
            identity=pipeline.identity(self.manifest_hash, batch_size=batch_size, seed=self._seed, weights=self.weights)
            | {"process_count": process_count, "workers": self._workers},
        )

    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        """Return the first `count` blocks of a domain, at least one, whatever the seed; they are read once and kept.

        Spreading them over all documents would require reading the whole domain first; prepared blocks allow that.
        """
        del seed
        splits = ("validation",) if domain in self.in_domain else ("validation", "train")
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for split in splits:
            if count > 0:
                found.append(self._first_blocks(split, domain, count))
                count -= len(found[-1][0])
        rows = np.concatenate([rows for rows, _ in found])
        if not len(rows):
            raise UserError(
                f"Domain {domain!r} has fewer than {self.seq_len + 1} tokens, one block, to evaluate on "
                f"(split {' and '.join(splits)}); let config.data.path be a directory that holds train/ and "
                "validation/, lower config.train.seq_len, or leave the domain out of "
                "config.data.eval_domains."
            )
        documents = np.concatenate([of_split + (1 << 32) * i for i, (_, of_split) in enumerate(found)])
        return EvalBlocks(rows, np.arange(len(rows)), documents, block_bytes(rows, self.tokenizer))

    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """Return the first `count` training blocks of a domain, ids [n, T+1]."""
        rows, _ = self._first_blocks("train", domain, count)
        if not len(rows):
            raise UserError(
                f"The training shards have less than one block of {self.seq_len + 1} tokens of {domain!r}; "
                "let config.data.path be a directory that has it, or name those to use in "
                "config.data.train_domains."
            )
        return rows

    def _candidates(self, split: str, domain: str) -> tuple[shards.Shard, ...]:
        """Return the shards that may hold a domain, which are all but those in a directory of another domain."""
        return tuple(s for s in self._shards if s.split == split and s.domain in (None, domain))

    def _first_blocks(self, split: str, domain: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `count` blocks [n, T+1] and the document of each [n]."""
        block = self.seq_len + 1
        requested, rows, owners = self._read.get(
            (split, domain), (0, np.empty((0, block), id_dtype(self.tokenizer.vocab_size)), np.empty(0, np.int64))
        )
        if requested < count:
            rows, owners = self._read_blocks(split, domain, count)
            self._read[split, domain] = (count, rows, owners)
        return rows[:count], owners[:count]

    def _read_blocks(self, split: str, domain: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        block = self.seq_len + 1
        tokenizer = self.tokenizer
        pieces: list[np.ndarray] = []
        total = 0
        for shard in self._candidates(split, domain):
            for _, text in shards.documents(shard, (domain,), shards.Skipped(shard.name)):
                pieces.append(with_specials(tokenizer, tokenizer.encode(text)))
                total += len(pieces[-1])
                if total >= count * block:
                    break
            if total >= count * block:
                break
        stream = np.concatenate(pieces) if pieces else np.empty(0, id_dtype(tokenizer.vocab_size))
        n_blocks = min(count, total // block)
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        owners = document_index.block_documents(lengths, block=block, n_blocks=n_blocks)
        return stream[: n_blocks * block].reshape(n_blocks, block), owners


def _to_batch(rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": np.stack(rows).astype(np.int32)}
