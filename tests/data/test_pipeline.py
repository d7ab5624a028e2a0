"""Training batches from blocks: order, shares, processes and exact resume."""

import math
import multiprocessing
from collections import Counter
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from seqjax.config import DataConfig
from seqjax.data import Corpus, open_corpus, pipeline
from seqjax.data.blocks import FlatBlocks
from seqjax.errors import UserError
from tests import support

from .conftest import assert_resumes, restore, save

T = 32


def open_blocks(blocks_dir: Path, **settings) -> Corpus:
    config = DataConfig(corpus="blocks", path=str(blocks_dir), **settings)
    return open_corpus(config, seq_len=T, vocab_size=258)


def take(iterator, count: int) -> np.ndarray:
    rows = np.concatenate([next(iterator)["tokens"] for _ in range(count)])
    iterator.close()
    return rows


@pytest.fixture
def numbered(tmp_path: Path):
    """Domains a (230 blocks) and b (100 blocks), each block with a unique number.

    Much smaller sets are slow: Grain's index shuffle then takes milliseconds per index.
    """

    def source(name: str, first: int, count: int) -> FlatBlocks:
        tokens = np.arange(first, first + count, dtype="<u2").repeat(4)
        tokens.tofile(tmp_path / name)
        return FlatBlocks(str(tmp_path / name), tokens=len(tokens), block=4)

    return {"a": source("a", 0, 230), "b": source("b", 1000, 100)}


def open_numbered(sources, *, batch_size: int, weights=(1.0, 1.0), seed: int = 0, index=0, count=1):
    return pipeline.block_batches(
        sources,
        weights=pipeline.token_shares(weights, list(sources)),
        batch_size=batch_size,
        seed=seed,
        workers=0,
        process_index=index,
        process_count=count,
        content="test",
    )


def numbers(sources, *, batches: int, batch_size: int = 1, **settings) -> list[int]:
    return take(open_numbered(sources, batch_size=batch_size, **settings), batches)[:, 0].tolist()


def test_batches_have_int32_rows_of_seq_len_plus_one(blocks_dir: Path):
    iterator = open_blocks(blocks_dir).train_iterator(batch_size=5)
    batch = next(iterator)["tokens"]
    assert batch.shape == (5, T + 1)
    assert batch.dtype == np.int32
    assert iterator.batches == 1
    iterator.close()


def test_epochs_are_different_permutations(numbered):
    only = {"a": numbered["a"]}
    order = numbers(only, batches=3 * 23, batch_size=10, weights=(1.0,))
    epochs = [order[:230], order[230:460], order[460:]]
    assert all(sorted(epoch) == list(range(230)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_only_on_the_seed(numbered):
    assert numbers(numbered, batches=50) == numbers(numbered, batches=50)
    assert numbers(numbered, batches=50) != numbers(numbered, batches=50, seed=1)
    # Seed 1 does not repeat the second epoch of seed 0.
    only = {"a": numbered["a"]}
    later = numbers(only, batches=46, batch_size=10, weights=(1.0,))[230:]
    assert later != numbers(only, batches=23, batch_size=10, weights=(1.0,), seed=1)


@pytest.mark.parametrize(
    "weights",
    support.slow_unless(
        lambda weights: weights in ((0.7, 0.3), (0.19, 0.57)),
        [((1.0, 1.0),), ((0.7, 0.3),), ((0.522, 0.267),), ((0.19, 0.57),)],
    ),
)
def test_token_shares_are_exact(numbered, weights):
    shares = pipeline.token_shares(weights, ["a", "b"])
    drawn = numbers(numbered, batches=100, batch_size=30, weights=weights)
    count = sum(n < 1000 for n in drawn)
    assert abs(count - 3000 * shares["a"]) <= 1
    assert shares["a"] == pytest.approx(weights[0] / sum(weights), rel=5e-3)


def test_zero_weight_is_refused():
    with pytest.raises(UserError, match=r"config\.data\.weights: .*'b' .*not 0\.0"):
        pipeline.token_shares((1.0, 0.0), ["a", "b"])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, math.nan), "config.data.weights: .*'b' .*not nan"),
        ((math.inf, 1.0), "config.data.weights: .*'a' .*not inf"),
        ((1.0, 1e-30), "config.data.weights: .*'a', 1.0, .*1,000,000,000 .*1e-30"),
    ],
)
def test_extreme_weights_are_refused(weights, message):
    with pytest.raises(UserError, match=message):
        pipeline.token_shares(weights, ["a", "b"])


def test_processes_divide_an_epoch(numbered):
    only = {"a": numbered["a"]}
    first = numbers(only, batches=115, weights=(1.0,), index=0, count=2)
    second = numbers(only, batches=115, weights=(1.0,), index=1, count=2)
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(230))


def test_more_processes_than_blocks_work(numbered):
    parts = [numbers(numbered, batches=2, index=i, count=101) for i in range(101)]
    assert [part[0] for part in parts] + [part[1] for part in parts] == numbers(numbered, batches=202)


@pytest.mark.parametrize(
    ("before", "after"),
    support.slow_unless(
        lambda *case: case in [(1, 2), (2, 4), (4, 1)], [(before, after) for before in (1, 2, 4) for after in (1, 2, 4)]
    ),
)
def test_resume_works_with_any_process_count(numbered, before: int, after: int):
    """Stopping after any of seven steps does not change the rows of any step."""
    size, steps = 8, 10

    def hosts(count: int) -> list[pipeline.TrainIterator]:
        return [open_numbered(numbered, batch_size=size // count, index=i, count=count) for i in range(count)]

    def step(of_hosts: list[pipeline.TrainIterator]) -> list[int]:
        return np.concatenate([next(host)["tokens"][:, 0] for host in of_hosts]).tolist()

    order = numbers(numbered, batches=steps, batch_size=size)
    for stop in range(7):
        first, second = hosts(before), hosts(after)
        rows = [row for _ in range(stop) for row in step(first)]
        states = [host.get_state() for host in first]
        assert all(state == states[0] for state in states)
        for host in second:
            host.set_state(states[0])
        rows += [row for _ in range(steps - stop) for row in step(second)]
        assert rows == order
        for host in (*first, *second):
            host.close()


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.8, 0.2)])
def test_blocks_occur_once_per_epoch_in_every_domain(blocks_dir: Path, shares: tuple[float, float]):
    """Each domain starts a new epoch after its last block."""
    domains = ("commoncrawl", "c4")
    corpus = open_blocks(blocks_dir, weights=shares, train_domains=domains)
    blocks = {d: {row.tobytes() for row in corpus.train_sample(d, count=10**6)} for d in domains}
    total = sum(map(len, blocks.values()))
    assert total == sum(corpus.tokens.values()) // (T + 1), "all blocks are different"
    rows = take(corpus.train_iterator(batch_size=2), total // 2 + 20)
    counts = Counter(row.astype("<u2").tobytes() for row in rows)
    assert counts.keys() <= set.union(*blocks.values())
    for domain, share in zip(domains, shares):
        drawn = sum(counts[block] for block in blocks[domain])
        assert abs(drawn - share * len(rows)) <= 1
        epochs, begun = divmod(drawn, len(blocks[domain]))
        times = Counter(counts[block] for block in blocks[domain])
        assert times == Counter({epochs: len(blocks[domain]) - begun}) + Counter({epochs + 1: begun})


def test_corpus_processes_read_different_blocks(blocks_dir: Path):
    corpus = open_blocks(blocks_dir, train_domains=("c4",))
    epoch = corpus.tokens["c4"] // (T + 1)
    parts = [take(corpus.train_iterator(batch_size=1, process_index=i, process_count=2), epoch // 2) for i in (0, 1)]
    seen = [{row.tobytes() for row in part} for part in parts]
    assert [len(part) for part in seen] == [epoch // 2] * 2
    assert not seen[0] & seen[1]


def test_resume_is_exact_at_every_batch(blocks_dir: Path, manager: ocp.CheckpointManager):
    corpus = open_blocks(blocks_dir, regime="mixed")
    assert_resumes(manager, lambda: corpus.train_iterator(batch_size=3), points=64, after=3)


def test_worker_count_changes_neither_order_nor_resume(blocks_dir: Path, manager: ocp.CheckpointManager):
    """Workers are separate processes."""
    plain = open_blocks(blocks_dir).train_iterator(batch_size=3)
    worked = open_blocks(blocks_dir, workers=2).train_iterator(batch_size=3)
    for _ in range(7):
        np.testing.assert_array_equal(next(plain)["tokens"], next(worked)["tokens"])
    assert len(multiprocessing.active_children()) >= 2
    save(manager, 0, worked)
    manager.wait_until_finished()
    worked.close()
    one = open_blocks(blocks_dir, workers=1).train_iterator(batch_size=3)
    none = open_blocks(blocks_dir).train_iterator(batch_size=3)
    for resumed in (one, none):
        restore(manager, 0, resumed)
    for _ in range(3):
        expected = next(plain)["tokens"]
        for resumed in (one, none):
            np.testing.assert_array_equal(next(resumed)["tokens"], expected)
    for iterator in (plain, one, none):
        iterator.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"train_domains": ("c4",)}, "weights"),
        ({"batch_size": 4}, "batch_size: 3 -> 4"),
        ({"process_count": 2}, "batch_size: 3 -> 6"),
    ],
)
def test_position_with_other_settings_is_refused(blocks_dir: Path, change: dict, message: str):
    state = open_blocks(blocks_dir).train_iterator(batch_size=3).get_state()
    call = {"batch_size": 3, **{k: change.pop(k) for k in ("batch_size", "process_count") if k in change}}
    iterator = open_blocks(blocks_dir, **change).train_iterator(**call)
    with pytest.raises(UserError, match=message):
        iterator.set_state(state)
