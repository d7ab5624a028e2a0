"""Training straight from `*.jsonl.zst` shards: read, tokenise, pack and mix as the run goes.

Each training domain has a reader of its own: the shards in an order shuffled per epoch, the documents of a
shard shuffled within windows of 1,024 lines, BOS + document + EOS joined and cut into blocks of T+1 tokens.
Blocks are then mixed in the shares of tokens. A row of another domain is dropped by a pattern before it is
parsed.

A block begins at a token of a document, so the place of a reader is (epoch, shard, window, document, token):
five numbers that survive JSON, with nothing buffered that could be lost. Resuming reads the shard up to the
window again.

Readers are divided over processes and workers by shard where there are enough, else by document. That
division is part of the order, so a checkpoint is refused by another number of processes or workers.

Natural shares cannot be counted beforehand: without weights, SlimPajama's published ones are used. For
anything long or mixed unevenly, prepare blocks: they shuffle globally and need a tenth of the processor
time.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from seqjax.config import DataConfig
from seqjax.data import pipeline, shard_jobs, shards, slimpajama
from seqjax.data.corpus import Corpus
from seqjax.data.tokenizer import Tokenizer
from seqjax.errors import UserError

WINDOW = 1024  # lines shuffled together, fewer where they are long
WINDOW_BYTES = 32 << 20
ENCODE = 32  # documents tokenised together
PREFETCH_BATCHES = 4
START = {"epoch": 0, "shard": 0, "window": 0, "document": 0, "token": 0}


@dataclasses.dataclass(frozen=True)
class Reader:
    """What one domain's iterator reads; `part` of `parts` is its share of the documents."""

    files: tuple[shards.Shard, ...]
    domain: str
    tokenizer: Tokenizer
    block: int
    seed: int
    part: int = 0
    parts: int = 1

    def order(self, epoch: int) -> list[shards.Shard]:
        """The shards of this part in the order of an epoch."""
        mine = self.files[self.part :: self.parts] if self._by_shard else self.files
        return [mine[i] for i in self._rng(epoch, "shards").permutation(len(mine))]

    def window(self, shard: shards.Shard, epoch: int, index: int, lines: list[bytes]) -> list[str]:
        """The texts of this part in one window of a shard, shuffled."""
        texts = []
        for line in lines:
            if (named := shards.set_name(line)) is not None and named != self.domain:
                continue
            try:
                domain, text = shards.parse(line, default=shard.domain)
            except shards.BadLineError:
                continue  # prepare counts and names them; here a bad line must not end a run
            if domain == self.domain:
                texts.append(text)
        order = self._rng(epoch, shard.name, index).permutation(len(texts))
        if not self._by_shard:
            order = order[self.part :: self.parts]
        return [texts[i] for i in order]

    @property
    def _by_shard(self) -> bool:
        return len(self.files) >= self.parts

    def _rng(self, *what: Any) -> np.random.Generator:
        key = hashlib.sha256(repr((self.seed, self.domain, *what)).encode()).digest()
        return np.random.default_rng(int.from_bytes(key[:8], "little"))


class DomainBlocks(grain.IterDataset):
    """Endless blocks, uint16 [T+1], of one domain."""

    def __init__(self, reader: Reader):
        super().__init__()
        self._reader = reader

    def __iter__(self) -> "DomainIterator":
        return DomainIterator(self._reader)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Grain's way to give worker `sl.start` of `sl.step` its share."""
        del sequential_slice
        self._reader = dataclasses.replace(
            self._reader,
            part=self._reader.part + self._reader.parts * sl.start,
            parts=self._reader.parts * sl.step,
        )


class DomainIterator(grain.DatasetIterator):
    """Blocks of one domain from any place in it."""

    def __init__(self, reader: Reader):
        super().__init__()
        self._reader = reader
        self.set_state(START)

    def __next__(self) -> np.ndarray:
        need = self._reader.block
        pieces = []
        while need:
            if self._ids is None:
                self._place, self._ids = next(self._documents)
            token = self._place["token"]
            piece = self._ids[token : token + need]
            pieces.append(piece)
            need -= len(piece)
            self._place["token"] = token + len(piece)
            if self._place["token"] == len(self._ids):
                # The next place is the document after this one; whether it is in another window, its reader
                # knows.
                self._place = {**self._place, "document": self._place["document"] + 1, "token": 0}
                self._ids = None
        return np.concatenate(pieces)

    def get_state(self) -> dict[str, Any]:
        """The place of the next token."""
        return dict(self._place)

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a place; it is read when the next block is asked for."""
        self._place = {key: int(state[key]) for key in START}
        self._ids: np.ndarray | None = None
        self._documents = _documents(self._reader, dict(self._place))


def _documents(reader: Reader, place: dict[str, int]) -> Iterator[tuple[dict[str, int], np.ndarray]]:
    """(place, ids with BOS and EOS) of every document from `place` on, for ever."""
    tokenizer = reader.tokenizer
    epoch, first_shard, first_window = place["epoch"], place["shard"], place["window"]
    first_document, token = place["document"], place["token"]
    while True:
        found = False
        for number, shard in enumerate(reader.order(epoch)):
            if number < first_shard:
                found = True
                continue
            for window, lines in enumerate(_windows(shard)):
                if window < first_window:
                    found = True
                    continue
                texts = reader.window(shard, epoch, window, lines)
                for start in range(first_document, len(texts), ENCODE):
                    encoded = tokenizer.encode_batch(texts[start : start + ENCODE])
                    for document, ids in enumerate(encoded, start):
                        whole = np.concatenate([[tokenizer.bos], ids, [tokenizer.eos]]).astype(np.uint16)
                        here = {"epoch": epoch, "shard": number, "window": window, "document": document}
                        yield {**here, "token": token}, whole
                        token = 0
                        found = True
                first_document = 0
            first_window = 0
        first_shard = 0
        if not found:
            raise UserError(
                f"No document of {reader.domain!r} in the {len(reader.files)} training shards (part "
                f"{reader.part} of {reader.parts}); give a source that has it, fewer config.data.workers, "
                "or other config.data.train_domains."
            )
        epoch += 1


def _windows(shard: shards.Shard) -> Iterator[list[bytes]]:
    lines: list[bytes] = []
    size = 0
    try:
        for line in shards.read_lines(shard):
            lines.append(line)
            size += len(line)
            if len(lines) == WINDOW or size >= WINDOW_BYTES:
                yield lines
                lines, size = [], 0
    except shards.TornShardError:
        pass  # what came before is good, and stays the same at every reading
    if lines:
        yield lines


class StreamCorpus(Corpus):
    """A corpus of shards that is tokenised while it is read."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, seq_len: int):
        train, evaluate = slimpajama.resolve(
            slimpajama.REGIMES[config.regime],
            train=config.train_domains,
            evaluate=config.eval_domains,
            known=slimpajama.NAMES,
        )
        self._shards = shards.find_shards(config.path)
        self._seed, self._workers = config.seed, config.workers
        self._read: dict[tuple[str, str], tuple[int, np.ndarray]] = {}
        weights = config.weights or [slimpajama.SHARES[domain] for domain in train]
        listing = [(shard.name, shard.split, shard.size) for shard in self._shards]
        super().__init__(
            name="stream",
            tokenizer=tokenizer,
            seq_len=seq_len,
            train_domains=train,
            eval_domains=evaluate,
            weights=pipeline.token_shares(weights, train),
            manifest_hash=hashlib.sha256(repr((listing, tokenizer.hash, seq_len)).encode()).hexdigest(),
            note="Streamed: shares of the domains are SlimPajama's published ones unless weights are given.",
        )
        for domain in train:
            self.train_sample(domain, count=1)
        for domain in evaluate:
            self.eval_blocks(domain, count=1)

    def train_iterator(
        self, *, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> grain.DatasetIterator:
        """Endless batches {"tokens": int32 [batch_size, T+1]}; resumes exactly through Orbax."""
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
        return pipeline.TrainIterator(
            iter(pipeline.with_workers(batches, self._workers)),
            identity=pipeline.identity(
                self.manifest_hash,
                batch_size=batch_size,
                process_count=process_count,
                seed=self._seed,
                weights=self.weights,
                workers=self._workers,
            ),
        )

    def eval_blocks(self, domain: str, *, count: int) -> np.ndarray:
        """The first `count` blocks of a domain, uint16 [n, T+1], at least one; read once and kept."""
        splits = ("validation",) if domain in self.in_domain else ("validation", "train")
        found: list[np.ndarray] = []
        for split in splits:
            if count > 0:
                found.append(self._first_blocks(split, domain, count))
                count -= len(found[-1])
        rows = np.concatenate(found)
        if not len(rows):
            raise UserError(
                f"Domain {domain!r} has fewer than {self.seq_len + 1} tokens, one block, to evaluate on "
                f"(split {' and '.join(splits)}); let config.data.path be a directory that holds train/ and "
                "validation/, lower config.train.seq_len, or leave the domain out of "
                "config.data.eval_domains."
            )
        return rows

    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """The first `count` training blocks of a domain, uint16 [n, T+1]."""
        rows = self._first_blocks("train", domain, count)
        if not len(rows):
            raise UserError(
                f"The training shards have less than one block of {self.seq_len + 1} tokens of {domain!r}; "
                "let config.data.path be a directory that has it, or name those to use in "
                "config.data.train_domains."
            )
        return rows

    def _candidates(self, split: str, domain: str) -> tuple[shards.Shard, ...]:
        """The shards that may hold a domain: a directory named after another one is left out."""
        return tuple(s for s in self._shards if s.split == split and s.domain in (None, domain))

    def _first_blocks(self, split: str, domain: str, count: int) -> np.ndarray:
        block = self.seq_len + 1
        read, rows = self._read.get((split, domain), (0, np.empty((0, block), np.uint16)))
        if read < count:
            rows = self._read_blocks(split, domain, count)
            self._read[split, domain] = (count, rows)
        return rows[:count]

    def _read_blocks(self, split: str, domain: str, count: int) -> np.ndarray:
        block = self.seq_len + 1
        tokenizer = self.tokenizer
        pieces: list[np.ndarray] = []
        total = 0
        for shard in self._candidates(split, domain):
            for _, text in shard_jobs.documents(shard, (domain,), shard_jobs.Skipped(shard.name)):
                ids = tokenizer.encode(text)
                pieces.append(np.concatenate([[tokenizer.bos], ids, [tokenizer.eos]]).astype(np.uint16))
                total += len(ids) + 2
                if total >= count * block:
                    break
            if total >= count * block:
                break
        stream = np.concatenate(pieces) if pieces else np.empty(0, np.uint16)
        blocks = min(count, total // block)
        return stream[: blocks * block].reshape(blocks, block)


def _to_batch(rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {"tokens": np.stack(rows).astype(np.int32)}
