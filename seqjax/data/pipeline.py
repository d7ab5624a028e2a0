"""Training batches through Grain, and the iterator whose state is saved in checkpoints.

Blocks go through `source -> [i::n] -> shuffle -> repeat` per domain, then a weighted mix, batching, and read threads or
worker processes. Every step is a function of an index, so the shuffle is global, token shares are exact,
and the state is a single number. Each epoch of each domain has its own order, which depends on the seed, the
domain's name and the epoch.

`TrainIterator` adds to Grain's state the settings that its position depends on (data, seed, processes, workers,
batch) and refuses to resume under other ones, which would silently skip and repeat data.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from seqjax.data import blocks
from seqjax.errors import UserError
from seqjax.processes import end_with_parent

READ_THREADS = 2
PREFETCH_BATCHES = 8
ENDLESS = 1 << 50  # blocks; Grain's own infinite length overflows with batches of one
WIDEST = 10**9  # the largest weight over the smallest one; Grain counts in 64 bits
SHARE_STEPS = 100  # Shares are integer multiples of 1/100 of the smallest one.


class TrainIterator(grain.DatasetIterator):
    """Iterates over the batches of `inner` and counts them; its state names the settings that it belongs to."""

    def __init__(self, inner: grain.DatasetIterator, *, identity: Mapping[str, Any]):
        super().__init__(inner)
        self._identity = dict(identity)
        self.batches = 0  # returned so far; also the index of the next one

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._parent)
        self.batches += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the position in JSON-compatible types."""
        return {"identity": self._identity, "batches": self.batches, "inner": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Move to a saved position; raise `UserError` if it belongs to other data or another division of it."""
        saved = state["identity"]
        changed = [
            f"{key}: {saved.get(key)!r} -> {self._identity.get(key)!r}"
            for key in sorted(saved.keys() | self._identity.keys())
            if saved.get(key) != self._identity.get(key)
        ]
        if changed:
            raise UserError(
                "The checkpoint's place in the data belongs to other settings; going on would skip and "
                f"repeat data. Restore them, or start a new --workdir. Changed: {'; '.join(changed)}."
            )
        self.batches = state["batches"]
        self._parent.set_state(state["inner"])


def token_shares(weights: Sequence[float], domains: Sequence[str]) -> dict[str, float]:
    """Return the normalised shares, exactly as the mix realises them.

    Raises `UserError` unless all weights are above 0, finite, and within a factor of `WIDEST`.
    """
    for domain, weight in zip(domains, weights, strict=True):
        if not 0 < weight < math.inf:
            raise UserError(f"config.data.weights: the weight of {domain!r} must be above 0 and finite, not {weight}.")
        if weight > WIDEST * min(weights):
            raise UserError(
                f"config.data.weights: the weight of {domain!r}, {weight}, is more than {WIDEST:,} times the smallest, "
                f"{min(weights)}; leave domains of so little weight out of config.data.train_domains."
            )
    steps = proportions(weights)
    return {domain: step / sum(steps) for domain, step in zip(domains, steps, strict=True)}


def proportions(weights: Sequence[float]) -> list[int]:
    """Return integer proportions, 100 for the smallest weight, because Grain would truncate products of floats."""
    return [round(SHARE_STEPS * weight / min(weights)) for weight in weights]


def domain_seed(seed: int, domain: str) -> int:
    """Return a seed per domain, hashed because Grain shuffles epoch e with seed + e and near seeds would coincide."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{domain}".encode()).digest()[:4], "little")


def to_batch(records: Sequence[bytes], *, dtype: np.dtype = blocks.DTYPE) -> dict[str, np.ndarray]:
    """Convert B records of ids [T+1] to {"tokens": int32 [B, T+1]}."""
    rows = np.frombuffer(b"".join(records), dtype)
    return {"tokens": rows.astype(np.int32).reshape(len(records), -1)}


def with_workers(dataset: grain.IterDataset, workers: int) -> grain.IterDataset:
    """Move the reading of `dataset` to `workers` processes; 0 leaves it in this process."""
    if workers == 0:
        return dataset
    if not flags.FLAGS.is_parsed():
        # Grain passes the absl flags on to its workers, but a notebook or a test has not parsed any.
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
) -> TrainIterator:
    """Return this process's share of endless shuffled batches from the blocks of several domains, of ids of `dtype`."""
    parts = []
    for domain, source in sources.items():
        if len(source) < process_count:
            raise UserError(
                f"Domain {domain!r} has {len(source)} training blocks for {process_count} processes; "
                "prepare more of it, or leave it out of config.data.train_domains."
            )
        part = grain.MapDataset.source(source)[process_index::process_count]
        parts.append(part.shuffle(seed=domain_seed(seed, domain)).repeat(ENDLESS // len(part)))
    # Grain scales the smallest weight to SHARE_STEPS, which it already is here, so nothing is truncated.
    shares = [float(p) for p in proportions([weights[domain] for domain in sources])]
    mixed = grain.MapDataset.mix(parts, shares) if len(parts) > 1 else parts[0]
    batches = mixed.batch(batch_size, batch_fn=functools.partial(to_batch, dtype=dtype))
    options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=PREFETCH_BATCHES)
    dataset = with_workers(batches.to_iter_dataset(options), workers)
    return TrainIterator(
        iter(dataset),
        identity=identity(
            content,
            batch_size=batch_size,
            process_count=process_count,
            seed=seed,
            weights=weights,
            workers=workers,
        ),
    )


def identity(
    content: str,
    *,
    batch_size: int,
    process_count: int,
    seed: int,
    weights: Mapping[str, float],
    workers: int,
) -> dict[str, Any]:
    """Return the settings that a position in the data belongs to; `content` is the manifest hash."""
    return {
        "batch_size": batch_size,
        "data": content,
        "process_count": process_count,
        "seed": seed,
        "weights": {domain: round(share, 6) for domain, share in weights.items()},
        "workers": workers,
    }
