"""Train directly from text shards: read, tokenise, pack and mix during the run.

In a suitable source, records contain SlimPajama's domain field, or each shard holds one domain, as in
tensorflow-datasets (`corpus=tfds`). Each training domain has its own reader. In every epoch the reader shuffles the
shard order, and it shuffles documents within windows of 1,024 records. It concatenates BOS + document + EOS, cuts
blocks of T + 1 tokens, and the blocks are mixed by token share.

The reader position is (epoch, shard, window, document, token): five JSON-compatible numbers and no buffer. To resume, a
reader reads the current shard again up to its window. Shards are divided over processes and workers, or documents if
there are too few shards. This division determines the order, so the number of processes and workers cannot change when
a run resumes. A hash over up to 64 MiB of shard content is saved too, so a run cannot resume on different text.

Without weights, the token shares are SlimPajama's published shares, or byte shares if each file holds one domain. For
long runs or uneven mixtures, prepare blocks: they are shuffled globally and need a tenth of the CPU time.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from absl import logging

from seqjax import store
from seqjax.config import DataConfig
from seqjax.data import document_index, document_sources, pipeline, regimes, shards, slimpajama
from seqjax.data.corpus import Corpus, EvalBlocks, block_bytes
from seqjax.data.layout import SLIMPAJAMA, BadLineError, Layout
from seqjax.data.sources import Shard, TornShardError, tfds
from seqjax.data.splits import SPLITS
from seqjax.data.tokenizer import Tokenizer, id_dtype, with_specials
from seqjax.errors import UserError

WINDOW = 1024  # records shuffled together; fewer if they exceed WINDOW_BYTES
WINDOW_BYTES = 32 << 20
ENCODE = 32  # documents tokenised together
Record = bytes | dict[str, Any]
START = {"epoch": 0, "shard": 0, "window": 0, "document": 0, "token": 0}


@dataclasses.dataclass(frozen=True)
class Reader:
    """Settings of one domain's iterator; it reads share `part` of `parts`."""

    files: tuple[Shard, ...]
    domain: str
    tokenizer: Tokenizer
    block: int
    seed: int
    part: int = 0
    parts: int = 1
    layout: Layout = SLIMPAJAMA

    def order(self, epoch: int) -> list[Shard]:
        """Return this part's shards in the order of an epoch."""
        mine = self.files[self.part :: self.parts] if self._by_shard else self.files
        return [mine[i] for i in self._rng(epoch, "shards").permutation(len(mine))]

    def window(self, shard: Shard, epoch: int, index: int, records: list[Record]) -> list[str]:
        """Return this part's texts from one window of a shard, shuffled."""
        texts = []
        default = self.layout.file_domain(shard.name)
        for record in records:
            try:
                document = shards.parse(record, default=default, layout=self.layout)
            except BadLineError:
                continue  # A bad line must not end a run; `prepare` counts and lists bad lines.
            if document.domain == self.domain:
                texts.append(document.text)
        order = self._rng(epoch, shard.name, index).permutation(len(texts))
        if not self._by_shard:
            order = order[self.part :: self.parts]
        return [texts[i] for i in order]

    @property
    def _by_shard(self) -> bool:
        return len(self.files) >= self.parts

    def _rng(self, *parts: Any) -> np.random.Generator:
        key = hashlib.sha256(repr((self.seed, self.domain, *parts)).encode()).digest()
        return np.random.default_rng(int.from_bytes(key[:8], "little"))


class DomainBlocks(grain.IterDataset):
    """Endless blocks of token ids, [T+1], from one domain."""

    def __init__(self, reader: Reader):
        super().__init__()
        self._reader = reader

    def __iter__(self) -> "DomainIterator":
        return DomainIterator(self._reader)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Restrict this dataset to worker `sl.start` of `sl.step` workers.

        Grain calls this in each worker process.
        """
        del sequential_slice
        self._reader = dataclasses.replace(
            self._reader,
            part=self._reader.part + self._reader.parts * sl.start,
            parts=self._reader.parts * sl.step,
        )


class DomainIterator(grain.DatasetIterator):
    """Iterates over one domain's blocks from any position."""

    def __init__(self, reader: Reader):
        super().__init__()
        self._reader = reader
        self.set_state(START)

    def __next__(self) -> np.ndarray:
        need = self._reader.block
        pieces = []
        while need:
            if self._ids is None:
                self._position, self._ids = next(self._documents)
            token = self._position["token"]
            piece = self._ids[token : token + need]
            pieces.append(piece)
            need -= len(piece)
            self._position["token"] = token + len(piece)
            if self._position["token"] == len(self._ids):
                # Move to the next document; `_documents` moves on if the window has no more documents.
                self._position = {**self._position, "document": self._position["document"] + 1, "token": 0}
                self._ids = None
        return np.concatenate(pieces)

    def get_state(self) -> dict[str, Any]:
        """Return the position of the next token."""
        return dict(self._position)

    def set_state(self, state: dict[str, Any]) -> None:
        """Move to a position; the next request reads from there."""
        self._position = {key: int(state[key]) for key in START}
        self._ids: np.ndarray | None = None
        self._documents = _documents(self._reader, dict(self._position))


def _documents(reader: Reader, position: dict[str, int]) -> Iterator[tuple[dict[str, int], np.ndarray]]:
    """Yield (position, ids with BOS and EOS) per document, over endless epochs.

    The first document is at `position`.
    """
    tokenizer = reader.tokenizer
    epoch, first_shard, first_window = position["epoch"], position["shard"], position["window"]
    first_document, token = position["document"], position["token"]
    while True:
        has_documents = False
        for number, shard in enumerate(reader.order(epoch)):
            if number < first_shard:
                has_documents = True
                continue
            for window, records in enumerate(_windows(shard, reader.layout)):
                if window < first_window:
                    has_documents = True
                    continue
                texts = reader.window(shard, epoch, window, records)
                for start in range(first_document, len(texts), ENCODE):
                    encoded = tokenizer.encode_batch(texts[start : start + ENCODE])
                    for document, ids in enumerate(encoded, start):
                        here = {"epoch": epoch, "shard": number, "window": window, "document": document}
                        yield {**here, "token": token}, with_specials(tokenizer, ids)
                        token = 0
                        has_documents = True
                first_document = 0
            first_window = 0
        first_shard = 0
        if not has_documents:
            raise UserError(
                f"The {len(reader.files)} training shards have no document of {reader.domain!r} (part "
                f"{reader.part} of {reader.parts}); use a source that has it, lower config.data.workers, "
                "or change config.data.train_domains."
            )
        epoch += 1


def _windows(shard: Shard, layout: Layout) -> Iterator[list[Record]]:
    records: list[Record] = []
    size = 0
    try:
        for record in shards.records(shard, layout):
            records.append(record)
            size += len(record if isinstance(record, bytes) else str(record.get(layout.text_field)))
            if len(records) == WINDOW or size >= WINDOW_BYTES:
                yield records
                records, size = [], 0
    except TornShardError:
        pass  # The records before the damage are valid, and every read returns the same records.
    if records:
        yield records


PREFETCH_BATCHES = 4
SAMPLED_SHARDS, SAMPLED_BYTES, SAMPLED_PIECE = 64, 64 << 20, 64 << 10  # for the text hash


class FirstBlocks(NamedTuple):
    """Blocks [n, T+1], their documents [n], and the source of every document.

    `sources` has an empty name for an unknown source.
    """

    rows: np.ndarray
    documents: np.ndarray
    sources: list[str]


class StreamCorpus(Corpus):
    """A corpus that tokenises its shards while reading them."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, seq_len: int):
        if config.corpus == "tfds":
            self._shards: list[Shard] = tfds.config_shards(
                config.tfds,
                config.path,
                feature=config.tfds_feature,
                train_split=config.tfds_train_split,
                validation_split=config.tfds_validation_split,
            )
        else:
            self._shards = shards.find_shards(config.path, on_message=logging.warning)
        for kind in {type(shard) for shard in self._shards}:
            kind.require()
        self._layout = self._shards[0].layout
        train, evaluate = self._domains(config)
        self._seed, self._workers = config.seed, config.workers
        self._hash = ""
        self._read: dict[tuple[str, str], tuple[int, FirstBlocks]] = {}  # requested count, blocks
        shares, origin = slimpajama.SHARES, "SlimPajama's published shares"
        if not self._layout.is_slimpajama:
            shares, origin = self._sizes({*train, *evaluate}), "byte shares of the training files"
        datasets = f" from tensorflow-datasets ({', '.join(config.tfds)})" if config.tfds else ""
        listing = [(shard.name, shard.split, shard.size) for shard in self._shards]
        super().__init__(
            name=config.corpus,
            tokenizer=tokenizer,
            seq_len=seq_len,
            train_domains=train,
            eval_domains=evaluate,
            weights=pipeline.token_shares(config.weights or [shares[domain] for domain in train], train),
            natural_shares={domain: shares[domain] for domain in evaluate},
            manifest_hash=hashlib.sha256(repr((listing, tokenizer.hash, seq_len)).encode()).hexdigest(),
            note=f"Streamed{datasets}: without weights, the token shares are {origin}.",
        )
        for domain in train:
            self.train_sample(domain, count=1)
        for domain in evaluate:
            self.eval_blocks(domain, count=1)

    def _domains(self, config: DataConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the training domains and the evaluated domains."""
        if self._layout.is_slimpajama:  # Every shard may contain all domains.
            return regimes.resolve(
                regimes.REGIMES[config.regime],
                train=config.train_domains,
                evaluate=config.eval_domains,
                known=slimpajama.NAMES,
            )
        domain_of = self._layout.file_domain
        available, in_train = (
            {domain_of(shard.name) or "" for shard in self._shards if shard.split in of_splits}
            for of_splits in (SPLITS, ("train",))
        )
        names = ", ".join(config.tfds) or config.path
        if len(available) == 1 and not config.train_domains:
            only = tuple(available)
            config = dataclasses.replace(config, train_domains=only, eval_domains=config.eval_domains or only)
        return regimes.choose(
            config, train=in_train, evaluate=available, where=names, fix="build the datasets that hold them"
        )

    def _sizes(self, domains: Collection[str]) -> dict[str, float]:
        """Return the training bytes of each domain, or its validation bytes if none."""
        size = {
            split: {domain: sum(s.size for s in self._candidates(split, domain)) for domain in domains}
            for split in ("train", "validation")
        }
        return {domain: float(size["train"][domain] or size["validation"][domain]) for domain in domains}

    def train_iterator(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> pipeline.TrainIterator:
        """Return an endless iterator of {"tokens": int32 [batch_size, T+1]}.

        The iterator resumes exactly through Orbax.
        """
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
                    layout=self._layout,
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
            # Each process and worker reads its own shards, so a position is valid only for the same numbers of both.
            identity=pipeline.identity(self.manifest_hash, batch_size=batch_size, seed=self._seed, weights=self.weights)
            | {"process_count": process_count, "workers": self._workers, "text": self._text_hash()},
        )

    def _text_hash(self) -> str:
        """Return a hash of shard samples.

        It detects most text changes that keep all file names and sizes.
        """
        if not self._hash:
            chosen = [self._shards[i] for i in _spaced(len(self._shards), SAMPLED_SHARDS)]
            parts = store.in_threads(functools.partial(_parts_hash, most=SAMPLED_BYTES // len(chosen)), chosen)
            self._hash = hashlib.sha256(b"".join(parts)).hexdigest()
        return self._hash

    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        """Return the first `count` blocks of a domain, at least one.

        `seed` has no effect. Blocks are read once and kept. Spreading them over all documents would require reading the
        whole domain first; use prepared blocks for that.

        Raises `UserError` if the domain has less than one block.
        """
        del seed
        splits = ("validation",) if domain in self.in_domain else ("validation", "train")
        by_split: list[FirstBlocks] = []
        for split in splits:
            if count > 0:
                by_split.append(self._first_blocks(split, domain, count))
                count -= len(by_split[-1].rows)
        rows = np.concatenate([of_split.rows for of_split in by_split])
        if not len(rows):
            raise UserError(
                f"Domain {domain!r} has no evaluation block of {self.seq_len + 1} tokens "
                f"(split {' and '.join(splits)}); set config.data.path to a directory that holds train/ and "
                "validation/, lower config.train.seq_len, or leave the domain out of "
                "config.data.eval_domains."
            )
        documents = np.concatenate([of_split.documents + (1 << 32) * i for i, of_split in enumerate(by_split)])
        names = [of_split.sources[document] for of_split in by_split for document in of_split.documents]
        return EvalBlocks(
            rows,
            np.arange(len(rows)),
            documents,
            block_bytes(rows, self.tokenizer),
            document_sources.numbers(names, documents),
        )

    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """Return the first `count` training blocks of a domain, ids [n, T+1].

        Raises `UserError` if the domain has less than one block.
        """
        rows = self._first_blocks("train", domain, count).rows
        if not len(rows):
            raise UserError(
                f"The training shards have less than one block of {self.seq_len + 1} tokens in domain {domain!r}; "
                "set config.data.path to a source with more text in it, or leave the domain out of "
                "config.data.train_domains."
            )
        return rows

    def _candidates(self, split: str, domain: str) -> tuple[Shard, ...]:
        """Return the shards that may contain a domain.

        Only shards in another domain's directory are excluded.
        """
        domain_of = self._layout.file_domain
        return tuple(s for s in self._shards if s.split == split and domain_of(s.name) in (None, domain))

    def _first_blocks(self, split: str, domain: str, count: int) -> FirstBlocks:
        """Return at most `count` blocks."""
        requested, first_blocks = self._read.get((split, domain), (-1, None))
        if first_blocks is None or requested < count:
            first_blocks = self._read_blocks(split, domain, count)
            self._read[split, domain] = (count, first_blocks)
        return FirstBlocks(first_blocks.rows[:count], first_blocks.documents[:count], first_blocks.sources)

    def _read_blocks(self, split: str, domain: str, count: int) -> FirstBlocks:
        block = self.seq_len + 1
        tokenizer = self.tokenizer
        pieces: list[np.ndarray] = []
        sources: list[str] = []
        total = 0
        for shard in self._candidates(split, domain):
            for document in shards.documents(shard, (domain,), shards.Skipped(shard.name), layout=self._layout):
                pieces.append(with_specials(tokenizer, tokenizer.encode(document.text)))
                sources.append(document.source)
                total += len(pieces[-1])
                if total >= count * block:
                    break
            if total >= count * block:
                break
        stream = np.concatenate(pieces) if pieces else np.empty(0, id_dtype(tokenizer.vocab_size))
        n_blocks = min(count, total // block)
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        owners = document_index.block_documents(lengths, block=block, n_blocks=n_blocks)
        return FirstBlocks(stream[: n_blocks * block].reshape(n_blocks, block), owners, sources)


def _spaced(total: int, count: int) -> list[int]:
    """Return at most `count` of `total` indices, evenly spaced.

    The first and the last index are included.
    """
    count = min(total, count)
    return sorted({i * (total - 1) // max(1, count - 1) for i in range(count)})


def _parts_hash(shard: Shard, *, most: int) -> bytes:
    """Return the SHA-256 of evenly spaced pieces of a file.

    The pieces have about `most` bytes together, and at least two are read.
    """
    digest = hashlib.sha256()
    with store.reading(shard.url) as file:
        total = file.seek(0, 2)
        pieces = -(-total // SAMPLED_PIECE)
        for i in _spaced(pieces, max(2, most // SAMPLED_PIECE)):
            file.seek(i * SAMPLED_PIECE)
            digest.update(file.read(SAMPLED_PIECE))
    return digest.digest()


def _to_batch(rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": np.stack(rows).astype(np.int32)}
