"""Streaming from shards: documents, shares and exact resume."""

import itertools
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from seqjax.config import DataConfig
from seqjax.data import Corpus, open_corpus, shards, stream
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError

from .conftest import assert_resumes, restore, row, save, some_text, write_corpus, write_shard

T = 32


def open_stream(path: Path, **settings) -> Corpus:
    return open_corpus(DataConfig(corpus="stream", path=str(path), **settings), seq_len=T, vocab_size=258)


def texts(tokens: np.ndarray) -> list[str]:
    """Return the complete documents in a token stream."""
    tokenizer = ByteTokenizer()
    ends = np.flatnonzero(tokens == tokenizer.eos)
    starts = np.flatnonzero(tokens == tokenizer.bos)
    pairs = [(s, ends[ends > s][0]) for s in starts if (ends > s).any()]
    return [tokenizer.decode(tokens[s + 1 : e]) for s, e in pairs]


def reader(path: Path, domain: str = "c4", **change) -> stream.Reader:
    train_shards = tuple(s for s in shards.find_shards(str(path)) if s.split == "train")
    settings = {"block": 8, "seed": 0} | change
    return stream.Reader(files=train_shards, domain=domain, tokenizer=ByteTokenizer(), **settings)


def read(iterator, count: int) -> np.ndarray:
    return np.concatenate([next(iterator) for _ in range(count)])


@pytest.fixture
def even(tmp_path: Path) -> Path:
    """Three shards in which documents often end at the end of a block of 8."""
    rng = np.random.default_rng(1)
    for index in range(3):
        lines = [row("c4", f"{index}{i:02d}" + "y" * int(rng.choice([3, 3, 11, 4, 20]))) for i in range(30)]
        write_shard(tmp_path / f"s{index}.jsonl.zst", lines)
    return tmp_path


def test_epoch_contains_every_document_once(even: Path):
    iterator = stream.DomainBlocks(reader(even))
    total = sum(len(shards.parse(line)[1]) + 2 for s in reader(even).files for line in s.records())
    seen = texts(read(iter(iterator), total // 8))
    expected = sorted(shards.parse(line)[1] for s in reader(even).files for line in s.records())
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(expected)
    assert len(expected) - len(seen) <= 1  # the last block may be incomplete
    assert seen != expected


def test_epochs_have_different_orders(even: Path):
    tokens = texts(read(iter(stream.DomainBlocks(reader(even))), 400))
    assert len(tokens) > 2 * 90
    assert sorted(tokens[:90]) == sorted(tokens[90:180])
    assert tokens[:90] != tokens[90:180]


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_parts_divide_an_epoch(even: Path, parts: int):
    # There are three shards: 2 and 3 parts divide the shards, 5 parts divide the documents.
    expected = [shards.parse(line)[1] for s in reader(even).files for line in s.records()]
    seen = []
    for part in range(parts):
        blocks = stream.DomainBlocks(reader(even))
        blocks.set_slice(slice(part, None, parts))
        documents = stream._documents(blocks._reader, stream.START)
        epoch = itertools.takewhile(lambda item: item[0]["epoch"] == 0, documents)
        seen += [text for _, ids in epoch for text in texts(ids)]
    assert sorted(seen) == sorted(expected)


def test_resume_is_exact_at_every_block(even: Path):
    iterator = iter(stream.DomainBlocks(reader(even)))
    states, rows = [], []
    for _ in range(230):
        states.append(iterator.get_state())
        rows.append(next(iterator))
    assert states[200]["epoch"] >= 1
    for step in range(0, 220, 3):
        resumed = iter(stream.DomainBlocks(reader(even)))
        resumed.set_state(states[step])
        np.testing.assert_array_equal(read(resumed, 10), np.concatenate(rows[step : step + 10]))


def test_resume_is_exact_in_later_windows_and_shards(even: Path, monkeypatch: pytest.MonkeyPatch):
    """From every position, reading continues correctly into the next epoch."""
    monkeypatch.setattr(stream, "WINDOW", 7)
    monkeypatch.setattr(stream, "ENCODE", 3)
    iterator = iter(stream.DomainBlocks(reader(even)))
    states, rows = [], []
    for _ in range(400):
        states.append(iterator.get_state())
        rows.append(next(iterator))
    steps: dict[tuple[int, int], list[int]] = {}
    for step, state in enumerate(states):
        if state["epoch"] == 0:
            steps.setdefault((state["shard"], state["window"]), []).append(step)
    for position in ((2, 0), (0, 4), (1, 3), (2, 4)):
        for step in (steps[position][1], steps[position][-1]):
            resumed = iter(stream.DomainBlocks(reader(even)))
            resumed.set_state(states[step])
            np.testing.assert_array_equal(read(resumed, 200), np.concatenate(rows[step : step + 200]))
    assert max(state["document"] for state in states) > stream.ENCODE


def test_equal_shards_have_different_orders(tmp_path: Path):
    lines = [row("c4", f"{i:02d}") for i in range(40)]
    for index in range(2):
        write_shard(tmp_path / f"s{index}.jsonl.zst", lines)
    seen = texts(read(iter(stream.DomainBlocks(reader(tmp_path))), 40))
    assert sorted(seen[:40]) == sorted(seen[40:80])
    assert seen[:40] != seen[40:80]


def test_resume_through_orbax_is_exact(corpus_dir: Path, manager: ocp.CheckpointManager):
    corpus = open_stream(corpus_dir, regime="mixed")
    assert_resumes(manager, lambda: corpus.train_iterator(batch_size=4), points=64, after=3)


def test_resume_at_document_ends_is_exact(even: Path, manager: ocp.CheckpointManager):
    config = DataConfig(corpus="stream", path=str(even), train_domains=("c4",), eval_domains=("arxiv",))
    lines = [row("arxiv", "z" * 50)]
    write_shard(even / "validation" / "v.jsonl.zst", lines)
    corpus = open_corpus(config, seq_len=7, vocab_size=258)
    assert_resumes(manager, lambda: corpus.train_iterator(batch_size=1), points=64, after=3)


def test_weights_set_the_shares(corpus_dir: Path):
    corpus = open_stream(corpus_dir, train_domains=("github", "book"), weights=(3.0, 1.0))
    iterator = corpus.train_iterator(batch_size=40)
    rows = np.concatenate([next(iterator)["tokens"] for _ in range(5)])
    iterator.close()
    github = sum(b"github train" in bytes(r[r < 256].astype(np.uint8)) for r in rows)
    book = sum(b"book train" in bytes(r[r < 256].astype(np.uint8)) for r in rows)
    assert corpus.weights == {"github": 0.75, "book": 0.25}
    assert github > 2 * book > 0


def test_default_shares_are_published(corpus_dir: Path):
    weights = open_stream(corpus_dir).weights
    assert weights["commoncrawl"] == pytest.approx(0.522 / 0.789, rel=5e-3)


def test_bad_lines_and_torn_shards_are_skipped(tmp_path: Path):
    rng = np.random.default_rng(0)
    root = write_corpus(tmp_path, shards=1)
    good = [row("c4", some_text(rng, 20)) for _ in range(50)]
    bad = [b"{broken\n", b"\xff\xfe\n", row("c4", "  "), row("RedPajamaNone", "x")]
    path = write_shard(root / "train" / "bad.jsonl.zst", good + bad)
    path.write_bytes(path.read_bytes()[:-9])
    iterator = open_stream(root).train_iterator(batch_size=8)
    for _ in range(60):
        next(iterator)
    iterator.close()


@pytest.mark.slow
def test_resume_requires_the_same_worker_count(corpus_dir: Path, manager: ocp.CheckpointManager):
    corpus = open_stream(corpus_dir, workers=2)
    iterator = corpus.train_iterator(batch_size=4)
    for _ in range(5):
        next(iterator)
    save(manager, 0, iterator)
    manager.wait_until_finished()
    expected = [next(iterator)["tokens"] for _ in range(4)]
    restore(manager, 0, iterator)
    for tokens in expected:
        np.testing.assert_array_equal(next(iterator)["tokens"], tokens)
    iterator.close()
    with pytest.raises(UserError, match="workers: 2 -> 0"):
        restore(manager, 0, open_stream(corpus_dir).train_iterator(batch_size=4))


def test_evaluation_reads_validation_then_train(corpus_dir: Path):
    corpus = open_stream(corpus_dir)
    tokenizer = corpus.tokenizer
    inside = tokenizer.decode(corpus.eval_blocks("c4", count=10_000).tokens.ravel())
    assert "c4 validation" in inside
    assert "train" not in inside
    outside = tokenizer.decode(corpus.eval_blocks("arxiv", count=10_000).tokens.ravel())
    assert outside.index("arxiv validation") < outside.index("arxiv train")


def test_document_numbers_differ_between_splits(corpus_dir: Path):
    evaluation = open_stream(corpus_dir).eval_blocks("arxiv", count=10_000)
    n_validation = len(stream_of(corpus_dir, "validation", "arxiv")) // (T + 1)
    assert 0 < n_validation < len(evaluation.documents)
    assert not set(evaluation.documents[:n_validation]) & set(evaluation.documents[n_validation:])


def stream_of(root: Path, split: str, domain: str) -> np.ndarray:
    """Return a domain's documents with BOS and EOS, in shard order."""
    tokenizer = ByteTokenizer()
    split_shards = [s for s in shards.find_shards(str(root)) if s.split == split]
    documents = [shards.parse(line) for s in split_shards for line in s.records()]
    pieces = [[tokenizer.bos, *each.text.encode(), tokenizer.eos] for each in documents if each.domain == domain]
    return np.concatenate(pieces)


def test_evaluation_tokens_equal_the_documents(corpus_dir: Path):
    """Token by token, including BOS and EOS."""
    assert ByteTokenizer().bos != ByteTokenizer().eos
    corpus = open_stream(corpus_dir)
    for domain in ("c4", "arxiv"):
        blocks = corpus.eval_blocks(domain, count=10).tokens
        assert blocks.shape == (10, T + 1)
        np.testing.assert_array_equal(blocks.ravel(), stream_of(corpus_dir, "validation", domain)[: blocks.size])
    sample = corpus.train_sample("c4", count=10)
    np.testing.assert_array_equal(sample.ravel(), stream_of(corpus_dir, "train", "c4")[: sample.size])


def first_rows(corpus: Corpus, batches: int = 4, **options) -> np.ndarray:
    iterator = corpus.train_iterator(batch_size=4, **options)
    rows = np.concatenate([next(iterator)["tokens"] for _ in range(batches)])
    iterator.close()
    return rows


@pytest.fixture(scope="module", params=["one shard", "shards of one line"])
def for_order(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source where a seed changes only the document order or only the shard order."""
    root = tmp_path_factory.mktemp("order")
    rng = np.random.default_rng(0)
    lines = [row("c4", f"{i:02d} {some_text(rng, 15)}") for i in range(24)]
    write_shard(root / "validation" / "v.jsonl.zst", lines)
    for index in range(1) if request.param == "one shard" else range(24):
        write_shard(
            root / "train" / f"s{index:02d}.jsonl.zst",
            lines if request.param == "one shard" else lines[index : index + 1],
        )
    return root


def test_seed_determines_the_order(for_order: Path):
    def new(seed: int) -> np.ndarray:
        corpus = open_stream(for_order, train_domains=("c4",), eval_domains=("c4",), seed=seed)
        return first_rows(corpus)

    np.testing.assert_array_equal(new(1), new(1))
    orders = [texts(new(seed).ravel()) for seed in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 3
    documents = texts(stream_of(for_order, "train", "c4"))
    assert all(set(order) < set(documents) for order in orders)


def test_processes_read_different_documents(corpus_dir: Path):
    """The first blocks of two processes and of two workers share no document."""
    corpus = open_stream(corpus_dir, train_domains=("c4",), eval_domains=("c4",))
    first, second = (set(texts(first_rows(corpus, process_index=i, process_count=2).ravel())) for i in (0, 1))
    assert len(first) > 5
    assert len(second) > 5
    assert not first & second


def test_invalid_sources_are_refused(tmp_path: Path, corpus_dir: Path):
    with pytest.raises(UserError, match=r"/absent; .*shards"):
        open_stream(tmp_path / "absent")
    with pytest.raises(UserError, match=r"holds no .*jsonl\.zst"):
        open_stream(tmp_path)
    rng = np.random.default_rng(0)
    write_shard(tmp_path / "train/a.jsonl.zst", [row("c4", some_text(rng, 20)) for _ in range(50)])
    with pytest.raises(UserError, match=r"'commoncrawl'.*train_domains"):
        open_stream(tmp_path)
    with pytest.raises(UserError, match=r"'c4' .*validation.*config\.data\.path"):
        open_stream(tmp_path, train_domains=("c4",), eval_domains=("c4",))


def test_domain_comes_from_meta(tmp_path: Path):
    lines = [
        b'{"text": "of c4 %d", "other": {"redpajama_set_name": "RedPajamaBook"}, '
        b'"meta": {"redpajama_set_name": "RedPajamaC4"}}\n' % i
        for i in range(20)
    ]
    for split in ("train", "validation"):
        write_shard(tmp_path / split / "a.jsonl.zst", lines)
    corpus = open_stream(tmp_path, train_domains=("c4",), eval_domains=("c4",))
    assert "of c4" in "".join(texts(first_rows(corpus).ravel()))
