"""One domain of shards as an endless sequence of token blocks, starting from any position.

A block begins at a token of a document, so the position of a reader is (epoch, shard, window, document, token):
five JSON-compatible numbers, with no buffer that could be lost. Resuming reads the shard again up to the
window.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from seqjax.data import shards
from seqjax.data.layout import SLIMPAJAMA, BadLineError, Layout
from seqjax.data.sources import Shard, TornShardError
from seqjax.data.tokenizer import Tokenizer, with_specials
from seqjax.errors import UserError

WINDOW = 1024  # records shuffled together, fewer where they are long
WINDOW_BYTES = 32 << 20
ENCODE = 32  # documents tokenised together
Record = bytes | dict[str, Any]
START = {"epoch": 0, "shard": 0, "window": 0, "document": 0, "token": 0}


@dataclasses.dataclass(frozen=True)
class Reader:
    """Describes what the iterator of one domain reads; `part` of `parts` is its share of the documents."""

    files: tuple[Shard, ...]
    domain: str
    tokenizer: Tokenizer
    block: int
    seed: int
    part: int = 0
    parts: int = 1
    layout: Layout = SLIMPAJAMA

    def order(self, epoch: int) -> list[Shard]:
        """Return the shards of this part in the order of an epoch."""
        mine = self.files[self.part :: self.parts] if self._by_shard else self.files
        return [mine[i] for i in self._rng(epoch, "shards").permutation(len(mine))]

    def window(self, shard: Shard, epoch: int, index: int, records: list[Record]) -> list[str]:
        """Return the texts of this part in one window of a shard, shuffled."""
        texts = []
        default = self.layout.file_domain(shard.name)
        for record in records:
            if self.layout.is_slimpajama and (named := shards.set_name(record)) and named != self.domain:
                continue
            try:
                domain, text = shards.parse(record, default=default, layout=self.layout)
            except BadLineError:
                continue  # `prepare` counts and lists bad lines; here one must not end a run.
            if domain == self.domain:
                texts.append(text)
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
    """Endless blocks of ids, [T+1], of one domain."""

    def __init__(self, reader: Reader):
        super().__init__()
        self._reader = reader

    def __iter__(self) -> "DomainIterator":
        return DomainIterator(self._reader)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Restrict this dataset to the share of worker `sl.start` of `sl.step`; Grain calls it in each worker."""
        del sequential_slice
        self._reader = dataclasses.replace(
            self._reader,
            part=self._reader.part + self._reader.parts * sl.start,
            parts=self._reader.parts * sl.step,
        )


class DomainIterator(grain.DatasetIterator):
    """Iterates over the blocks of one domain from any position."""

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
                # The next position is the following document; if it is in another window, `_documents` finds it.
                self._position = {**self._position, "document": self._position["document"] + 1, "token": 0}
                self._ids = None
        return np.concatenate(pieces)

    def get_state(self) -> dict[str, Any]:
        """Return the position of the next token."""
        return dict(self._position)

    def set_state(self, state: dict[str, Any]) -> None:
        """Move to a position; nothing is read until the next block is requested."""
        self._position = {key: int(state[key]) for key in START}
        self._ids: np.ndarray | None = None
        self._documents = _documents(self._reader, dict(self._position))


def _documents(reader: Reader, position: dict[str, int]) -> Iterator[tuple[dict[str, int], np.ndarray]]:
    """Yield (position, ids with BOS and EOS) of every document from `position` on, over endless epochs."""
    tokenizer = reader.tokenizer
    epoch, first_shard, first_window = position["epoch"], position["shard"], position["window"]
    first_document, token = position["document"], position["token"]
    while True:
        found = False
        for number, shard in enumerate(reader.order(epoch)):
            if number < first_shard:
                found = True
                continue
            for window, records in enumerate(_windows(shard, reader.layout)):
                if window < first_window:
                    found = True
                    continue
                texts = reader.window(shard, epoch, window, records)
                for start in range(first_document, len(texts), ENCODE):
                    encoded = tokenizer.encode_batch(texts[start : start + ENCODE])
                    for document, ids in enumerate(encoded, start):
                        here = {"epoch": epoch, "shard": number, "window": window, "document": document}
                        yield {**here, "token": token}, with_specials(tokenizer, ids)
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


def _windows(shard: Shard, layout: Layout) -> Iterator[list[Record]]:
    records: list[Record] = []
    size = 0
    try:
        for record in shard.records(layout):
            records.append(record)
            size += len(record if isinstance(record, bytes) else str(record.get(layout.text_field)))
            if len(records) == WINDOW or size >= WINDOW_BYTES:
                yield records
                records, size = [], 0
    except TornShardError:
        pass  # The records before the damage are valid and the same at every reading.
    if records:
        yield records
