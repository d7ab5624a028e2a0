"""Build training batches with Grain, and iterators that checkpoints can resume.

Each domain's blocks go through `source -> shuffle -> repeat`; a weighted mix and batching follow. This gives one global
row order: step s takes rows s B to (s + 1) B, where B is the batch size over all processes. Every stage is a function
of an index. The shuffle is therefore global, token shares are exact, and the step number is the whole position. A run
can resume with any number of processes, workers or devices and reads the same batches. Each domain gets a new order in
each epoch, determined by the seed, the domain name and the epoch.

The iterator state also contains the settings that the position depends on (data, seed, weights, batch size; for streams
also processes and workers). Resuming with other settings is an error, because it would silently skip and repeat data.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import grain
import numpy as np
from absl import flags, logging

from seqjax.data import blocks
from seqjax.errors import UserError
from seqjax.terminal import end_with_parent

ENDLESS = 1 << 50  # blocks; Grain's infinite length overflows with batches of one
READ_THREADS = 2
PREFETCH_BATCHES = 8
WIDEST = 10**9  # largest ratio of two weights; Grain counts in 64 bits
SHARE_STEPS = 100  # every share is an integer multiple of 1/100 of the smallest share


class TrainIterator(grain.DatasetIterator):
    """Iterates over batches and counts them; its state includes its settings.

    Attributes:
        is_global: Whether all processes have the same state, for any number of processes.
        batches: Number of batches returned so far, which is also the next batch index.
    """

    is_global: ClassVar[bool]

    def __init__(self, *inner: grain.DatasetIterator, identity: Mapping[str, Any]):
        super().__init__(inner)
        self._identity = dict(identity)
        self.batches = 0

    def _require_same(self, saved: Mapping[str, Any]) -> None:
        """Raise `UserError` if a saved position has other settings."""
        if "text" in self._identity and "text" not in saved:  # Earlier versions did not write this hash.
            logging.warning("The checkpoint has no text hash, so the text was not checked for changes.")
            saved = {**saved, "text": self._identity["text"]}
        changed = [
            f"{key}: {saved.get(key)!r} -> {self._identity.get(key)!r}"
            for key in sorted(saved.keys() | self._identity.keys())
            if saved.get(key) != self._identity.get(key)
        ]
        if changed:
            raise UserError(
                f"The checkpoint was saved with other data settings ({'; '.join(changed)}), so resuming would skip "
                "and repeat data. Restore the settings, or start a new --workdir."
            )


class StreamIterator(TrainIterator):
    """Iterates over a Grain iterator's batches.

    Each process has its own position, valid only for the same number of processes.
    """

    is_global = False

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._parent)
        self.batches += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the position in JSON-compatible types."""
        return {"identity": self._identity, "batches": self.batches, "inner": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Move to a saved position.

        Raises `UserError` if its data, processes or workers differ.
        """
        self._require_same(state["identity"])
        self.batches = state["batches"]
        self._parent.set_state(state["inner"])


class BlockIterator(TrainIterator):
    """Iterates over this process's rows of the global batch order.

    The position is the number of batches, equal in all processes. At the first request, `from_batch` opens the batches
    from a given index. Grain's read threads and workers cannot seek after they have started.
    """

    is_global = True

    def __init__(self, from_batch: Callable[[int], grain.DatasetIterator], *, identity: Mapping[str, Any]):
        super().__init__(identity=identity)
        self._from_batch = from_batch
        self._inner: grain.DatasetIterator | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        self._assert_not_closed()
        if self._inner is None:
            self._inner = self._from_batch(self.batches)
        batch = next(self._inner)
        self.batches += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the position in JSON-compatible types."""
        return {"identity": self._identity, "batches": self.batches}

    def set_state(self, state: dict[str, Any]) -> None:
        """Move to a saved position; raise `UserError` if its data differs."""
        self._require_same(state["identity"])
        self._close_inner()
        self.batches = state["batches"]

    def close(self) -> None:
        """Stop threads and workers."""
        super().close()
        self._close_inner()

    def _close_inner(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None


class _PartOfBatches(grain.MapDataset):
    """The rows that process `index` of `count` reads.

    Each batch of `count * size` rows in the parent is divided into `count` runs of `size` rows; this is run `index`.
    """

    def __init__(self, parent: grain.MapDataset, *, size: int, index: int, count: int):
        super().__init__(parent)
        self._size, self._first, self._all = size, index * size, count * size

    def __len__(self) -> int:
        return len(self._parent) // self._all * self._size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        step, row = divmod(index, self._size)
        return self._parent[step * self._all + self._first + row]


def token_shares(weights: Sequence[float], domains: Sequence[str]) -> dict[str, float]:
    """Return the normalised token shares, exactly as the mix realises them.

    Raises `UserError` unless all weights are finite, above 0, and within a factor of `WIDEST`.
    """
    for domain, weight in zip(domains, weights, strict=True):
        if not 0 < weight < math.inf:
            raise UserError(f"config.data.weights: the weight of {domain!r} must be above 0 and finite, not {weight}.")
    for domain, weight in zip(domains, weights, strict=True):
        if weight > WIDEST * min(weights):
            raise UserError(
                f"config.data.weights: the weight of {domain!r}, {weight}, is more than {WIDEST:,} times the smallest, "
                f"{min(weights)}; leave domains with such small weights out of config.data.train_domains."
            )
    steps = proportions(weights)
    return {domain: step / sum(steps) for domain, step in zip(domains, steps, strict=True)}


def proportions(weights: Sequence[float]) -> list[int]:
    """Return integer proportions, with 100 for the smallest weight.

    Grain would truncate float products.
    """
    return [round(SHARE_STEPS * weight / min(weights)) for weight in weights]


def domain_seed(seed: int, domain: str) -> int:
    """Return a seed per domain.

    Grain shuffles epoch e with seed + e, so adjacent seeds would repeat orders. Hashing keeps the seeds far apart.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{domain}".encode()).digest()[:4], "little")


def to_batch(records: Sequence[bytes], *, dtype: np.dtype = blocks.DTYPE) -> dict[str, np.ndarray]:
    """Convert B records, each ids [T+1], to {"tokens": int32 [B, T+1]}."""
    rows = np.frombuffer(b"".join(records), dtype)
    return {"tokens": rows.astype(np.int32).reshape(len(records), -1)}


def with_workers(dataset: grain.IterDataset, workers: int) -> grain.IterDataset:
    """Read `dataset` in `workers` processes; 0 reads in this process."""
    if workers == 0:
        return dataset
    if not flags.FLAGS.is_parsed():
        # Grain passes the absl flags to its workers, and notebooks and tests do not parse them.
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
    return dataset.mp_prefetch(options, worker_init_fn=_start_worker)


def _start_worker(index: int, count: int) -> None:
    del index, count
    end_with_parent()


def block_batches(
    sources: Mapping[str, blocks.BlockSource],
    *,
    weights: Mapping[str, float],
    batch_size: int,
    seed: int,
    workers: int,
    process_index: int,
    process_count: int,
    content: str,
    dtype: np.dtype = blocks.DTYPE,
) -> BlockIterator:
    """Return this process's part of endless shuffled batches over several domains.

    The blocks hold ids of `dtype`. `batch_size` is per process; one step takes `batch_size * process_count` rows.
    """
    parts = []
    for domain, source in sources.items():
        parts.append(_endless(source, seed=domain_seed(seed, domain)))
    # The smallest weight already equals SHARE_STEPS, the value that Grain scales it to, so nothing is truncated.
    shares = [float(p) for p in proportions([weights[domain] for domain in sources])]
    rows = grain.MapDataset.mix(parts, shares) if len(parts) > 1 else parts[0]
    if process_count > 1:
        rows = _PartOfBatches(rows, size=batch_size, index=process_index, count=process_count)
    batches = rows.batch(batch_size, batch_fn=functools.partial(to_batch, dtype=dtype))
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=PREFETCH_BATCHES)

    def from_batch(first: int) -> grain.DatasetIterator:
        return iter(with_workers(batches[first:].to_iter_dataset(options), workers))

    return BlockIterator(
        from_batch, identity=identity(content, batch_size=batch_size * process_count, seed=seed, weights=weights)
    )


def _endless(source: blocks.BlockSource, *, seed: int) -> grain.MapDataset:
    """Return a domain's blocks in endless epochs, reshuffled in every epoch."""
    part = grain.MapDataset.source(source)
    return part.shuffle(seed=seed).repeat(ENDLESS // len(part))


def identity(content: str, *, batch_size: int, seed: int, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings that a data position depends on.

    `content` is the manifest hash.
    """
    return {
        "batch_size": batch_size,
        "data": content,
        "seed": seed,
        "weights": {domain: round(share, 6) for domain, share in weights.items()},
    }
