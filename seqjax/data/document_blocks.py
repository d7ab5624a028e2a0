"""Blocks of T + 1 tokens cut from documents that are tokenised when a block is read.

The documents of a domain can be read in any order, and the number of tokens of each is known (`token_counts`). So where
every block begins is known without tokenising what lies before it, and a block is a function of its index alone, as it
is for blocks on disk: a run goes on from a number, with any number of processes and workers.

The training order is made of documents, because a block that is read alone costs the tokenising of all of its
documents. In each epoch the documents are shuffled, all of them together, joined in that order, and cut into blocks
anew. The blocks are then dealt from `LANES` places at equal distances in turn, so that neighbours in a batch come from
different documents, while a process that remembers the documents it is at tokenises most of them once.
"""

import collections
import threading
from typing import Any, Protocol

import numpy as np

from seqjax.data.tokenizer import Tokenizer, with_specials
from seqjax.errors import UserError

LANES = 256
CACHE_BYTES = 1 << 27  # of tokenised documents, per domain and process; documents of 250,000 tokens in every lane
ENDLESS = 1 << 50  # blocks; Grain's own infinite length overflows with batches of one


class Documents(Protocol):
    """Random access to the texts of one domain and split."""

    name: str  # for messages

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def __getitem__(self, index: int) -> str:
        """Return the text of document `index`; empty if it has none that can be used."""
        ...


class DocumentBlocks:
    """The blocks of documents joined in their own order, each the bytes of ids [T+1]; a `blocks.BlockSource`.

    Args:
        documents: The texts.
        index: Which of them are used, uint32 [n].
        lengths: The tokens of each of those, BOS and EOS included, uint32 [n].
        tokenizer: What turns a text into that many tokens.
        block: T + 1.
        counts: The file with the lengths, for messages.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        index: np.ndarray,
        lengths: np.ndarray,
        tokenizer: Tokenizer,
        block: int,
        counts: str,
    ):
        self._documents, self._index, self._tokenizer, self._block = documents, index, tokenizer, block
        self._counts, self.lengths = counts, lengths
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._len = int(self._ends[-1]) // block if len(lengths) else 0
        self._prepare()

    def _prepare(self) -> None:
        """Make what a process has of its own."""
        self._lock = threading.Lock()
        self._recent: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
        self._recent_bytes = 0

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> bytes:
        return self.cut(None, self._ends, range(self._len)[index])

    def cut(self, order: np.ndarray | None, ends: np.ndarray, index: int) -> bytes:
        """Return block `index` of the documents joined in an order; `ends` [n] are the ends of the documents there."""
        start, need = index * self._block, self._block
        place = int(np.searchsorted(ends, start, side="right"))
        pieces = []
        while need:
            document = place if order is None else int(order[place])
            ids = self._tokens(document)
            piece = ids[len(ids) - (int(ends[place]) - start) :][:need]
            pieces.append(piece)
            start += len(piece)
            need -= len(piece)
            place += 1
        return b"".join(piece.tobytes() for piece in pieces)

    def _tokens(self, document: int) -> np.ndarray:
        """Return the ids of one of the documents used, with BOS and EOS."""
        # One thread at a time: what another one waits for is often the same document.
        with self._lock:
            ids = self._recent.pop(document, None)
            if ids is None:
                ids = self._tokenize(document)
                self._recent_bytes += ids.nbytes
            self._recent[document] = ids
            while self._recent_bytes > CACHE_BYTES and len(self._recent) > 1:
                self._recent_bytes -= self._recent.popitem(last=False)[1].nbytes
        return ids

    def _tokenize(self, document: int) -> np.ndarray:
        tokenizer = self._tokenizer
        number = int(self._index[document])
        ids = with_specials(tokenizer, tokenizer.encode(self._documents[number]))
        if len(ids) != self.lengths[document]:
            raise UserError(
                f"{self._documents.name}: document {number} has {len(ids)} tokens, and {self.lengths[document]} were "
                f"counted, so the data has changed since. Put it back as it was, or delete {self._counts}, so that its "
                "tokens are counted again, and start a new --workdir."
            )
        return ids

    def __repr__(self) -> str:
        return f"DocumentBlocks({self._documents.name!r}, {len(self)} blocks)"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith(("_lock", "_recent"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._prepare()


class ShuffledBlocks:
    """Endless epochs of `blocks`, each with the documents in an order of its own, which `seed` and the epoch decide."""

    def __init__(self, blocks: DocumentBlocks, *, seed: int):
        self._blocks, self._seed = blocks, seed
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # the last two, which threads may be at together

    def __len__(self) -> int:
        return ENDLESS // len(self._blocks) * len(self._blocks)

    def __getitem__(self, index: int) -> bytes:
        epoch, row = divmod(index, len(self._blocks))
        order, ends = self._epoch(epoch)
        return self._blocks.cut(order, ends, dealt(row, total=len(self._blocks)))

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents in the order of an epoch, and where each of them ends."""
        found = self._epochs.get(epoch)
        if found is None:
            lengths = self._blocks.lengths
            order = np.random.default_rng([self._seed, epoch]).permutation(len(lengths)).astype(np.uint32)
            found = order, np.cumsum(lengths[order], dtype=np.int64)
            self._epochs = {number: kept for number, kept in self._epochs.items() if number == epoch - 1} | {
                epoch: found
            }
        return found

    def __repr__(self) -> str:
        return f"ShuffledBlocks({self._blocks!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": {}}


def dealt(row: int, *, total: int) -> int:
    """Return the block that is row `row` of an epoch of `total`: the rows take one block from each lane in turn."""
    lanes = min(LANES, total)
    size, longer = divmod(total, lanes)  # the first `longer` lanes have a block more
    step, lane = divmod(row, lanes)
    return lane * size + min(lane, longer) + step
