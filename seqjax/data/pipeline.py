"""Training batches through Grain, and the iterator whose state goes into a checkpoint.

Blocks: per domain `source -> [i::n] -> shuffle -> repeat`, then a weighted mix, batches, and read threads or
worker processes. Every step is a function of an index, so a shuffle is global, shares of tokens are exact,
and the state is one number. Each epoch of each domain has an order of its own, decided by the seed, the
domain's name and the epoch.

`TrainIterator` adds to Grain's state what the numbers in it depend on (data, seed, processes, workers,
batch) and refuses to go on with another: that would skip and repeat data without a word.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from seqjax.data import blocks
from seqjax.errors import UserError

READ_THREADS = 2
PREFETCH_BATCHES = 8
ENDLESS = 1 << 50  # blocks; Grain's own endless length overflows in batches of one
SHARE_STEPS = 100  # shares are whole multiples of 1/100 of the smallest one


class TrainIterator(grain.DatasetIterator):
    """Batches of `inner`, counted, with a state that knows what it belongs to."""

    def __init__(self, inner: grain.DatasetIterator, *, identity: Mapping[str, Any]):
        super().__init__(inner)
        self._identity = dict(identity)
        self.batches = 0  # given so far; the index of the next one

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._parent)
        self.batches += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position, in types that JSON keeps."""
        return {"identity": self._identity, "batches": self.batches, "inner": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position; raises `UserError` for one of other data or another division of it."""
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
    """Normalised shares per domain, as the mix will realise them exactly."""
    for domain, weight in zip(domains, weights, strict=True):
        if not weight > 0:
            raise UserError(f"config.data.weights: the weight of {domain!r} must be above 0, not {weight}.")
    steps = proportions(weights)
    return {domain: step / sum(steps) for domain, step in zip(domains, steps, strict=True)}


def proportions(weights: Sequence[float]) -> list[int]:
    """Whole numbers, 100 for the smallest weight; Grain would truncate products of floats to them."""
    return [round(SHARE_STEPS * weight / min(weights)) for weight in weights]


def domain_seed(seed: int, domain: str) -> int:
    """A seed per domain; hashed, as Grain shuffles epoch e with seed + e and neighbours would meet."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{domain}".encode()).digest()[:4], "little")


def to_batch(records: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Records of uint16 [T+1] -> {"tokens": int32 [B, T+1]}."""
    rows = np.frombuffer(b"".join(records), blocks.DTYPE)
    return {"tokens": rows.astype(np.int32).reshape(len(records), -1)}


def with_workers(dataset: grain.IterDataset, workers: int) -> grain.IterDataset:
    """Move the reading of `dataset` to worker processes; 0 leaves it in this one."""
    if workers == 0:
        return dataset
    if not flags.FLAGS.is_parsed():
        # Grain hands its absl flags to the workers; a notebook or a test has parsed none.
        flags.FLAGS.mark_as_parsed()
    return dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))


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
) -> TrainIterator:
    """Endless shuffled batches of the blocks of several domains, the share of this process."""
    parts = []
    for domain, source in sources.items():
        if len(source) < process_count:
            raise UserError(
                f"Domain {domain!r} has {len(source)} training blocks for {process_count} processes; "
                "prepare more of it, or leave it out of config.data.train_domains."
            )
        part = grain.MapDataset.source(source)[process_index::process_count]
        parts.append(part.shuffle(seed=domain_seed(seed, domain)).repeat(ENDLESS // len(part)))
    # The smallest value given is SHARE_STEPS, which is what Grain scales the smallest to: it truncates
    # nothing.
    shares = [float(p) for p in proportions([weights[domain] for domain in sources])]
    mixed = grain.MapDataset.mix(parts, shares) if len(parts) > 1 else parts[0]
    batches = mixed.batch(batch_size, batch_fn=to_batch)
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
    """What a place in the data belongs to; `content` is the manifest hash."""
    return {
        "batch_size": batch_size,
        "data": content,
        "process_count": process_count,
        "seed": seed,
        "weights": {domain: round(share, 6) for domain, share in weights.items()},
        "workers": workers,
    }
