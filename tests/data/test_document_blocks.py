"""Blocks of documents that are tokenised when they are read, and the counts that say where blocks begin."""

import itertools
import pickle

import numpy as np
import pytest

from seqjax.data import document_blocks, hold_out, pipeline, token_counts
from seqjax.data.document_blocks import DocumentBlocks, ShuffledBlocks, dealt
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError

TOKENIZER = ByteTokenizer()
BLOCK = 9


class Texts(list):
    """Texts in memory."""

    name = "texts"


def texts(count: int, *, seed: int = 0, mark: str = "") -> Texts:
    """Texts that begin with a number of their own; every seventh is longer than several blocks, every tenth is none."""
    rng = np.random.default_rng(seed)
    return Texts(
        "" if i % 10 == 9 else f"{mark}{i:03d}" + "y" * int(rng.integers(0, 60 if i % 7 == 0 else 9))
        for i in range(count)
    )


def blocks_of(documents: Texts, *, block: int = BLOCK) -> DocumentBlocks:
    lengths = token_counts.count(documents, TOKENIZER).lengths
    used = lengths > 0
    return DocumentBlocks(
        documents,
        index=np.flatnonzero(used).astype(np.uint32),
        lengths=lengths[used],
        tokenizer=TOKENIZER,
        block=block,
        counts="counts.npz",
    )


def ids(record: bytes) -> np.ndarray:
    return np.frombuffer(record, "<u2")


def joined(documents: Texts) -> np.ndarray:
    pieces = [[TOKENIZER.bos, *text.encode(), TOKENIZER.eos] for text in documents if text]
    return np.concatenate(pieces).astype("<u2")


def found_in(stream: np.ndarray) -> list[str]:
    """The whole documents of a stream of tokens, in order."""
    starts, ends = np.flatnonzero(stream == TOKENIZER.bos), np.flatnonzero(stream == TOKENIZER.eos)
    return [TOKENIZER.decode(stream[s + 1 : e]) for s, e in zip(starts, ends)]


def epoch_of(shuffled: ShuffledBlocks, epoch: int, total: int) -> np.ndarray:
    """The tokens of an epoch in the order of its documents."""
    places = [dealt(row, total=total) for row in range(total)]
    rows = [ids(shuffled[epoch * total + row]) for row in np.argsort(places)]
    return np.concatenate(rows)


@pytest.mark.parametrize("block", [2, 9, 100])
def test_blocks_are_the_documents_joined_and_cut(block: int):
    documents = texts(50)
    blocks = blocks_of(documents, block=block)
    stream = joined(documents)
    assert len(blocks) == len(stream) // block
    order = np.random.default_rng(0).permutation(len(blocks))  # at any place, not one after the other
    rows = np.stack([ids(blocks[int(i)]) for i in order])[np.argsort(order)]
    np.testing.assert_array_equal(rows.ravel(), stream[: rows.size])
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def test_there_may_be_less_than_a_block():
    assert len(blocks_of(Texts(["ab"]))) == 0
    assert len(blocks_of(Texts([""]))) == 0
    assert len(blocks_of(Texts(["a" * (BLOCK - 2)]))) == 1


@pytest.mark.parametrize("total", [1, 2, 255, 256, 257, 511, 512, 1000])
def test_every_block_of_an_epoch_is_dealt_once(total: int):
    assert sorted(dealt(row, total=total) for row in range(total)) == list(range(total))


def test_neighbours_are_dealt_from_places_far_apart():
    total = 10 * document_blocks.LANES + 3
    rows = [dealt(row, total=total) for row in range(total)]
    assert min(abs(a - b) for a, b in itertools.pairwise(rows)) >= 10


def test_an_epoch_holds_every_document_once_in_an_order_of_its_own():
    documents = texts(80)
    blocks = blocks_of(documents)
    shuffled = ShuffledBlocks(blocks, seed=5)
    orders = [found_in(epoch_of(shuffled, epoch, len(blocks))) for epoch in range(3)]
    wanted = {text for text in documents if text}
    for order in orders:
        assert len(set(order)) == len(order)
        assert set(order) <= wanted
        assert len(wanted) - len(order) <= BLOCK // 3  # the last block is not whole
    other = found_in(epoch_of(ShuffledBlocks(blocks, seed=6), 0, len(blocks)))
    assert len({tuple(order[:20]) for order in (*orders, other, [t for t in documents if t])}) == 5


def test_a_block_does_not_depend_on_what_was_read_before(monkeypatch: pytest.MonkeyPatch):
    """Epochs forwards, backwards, with hardly any memory, and in another process."""
    blocks = blocks_of(texts(40))
    shuffled = ShuffledBlocks(blocks, seed=0)
    rows = range(3 * len(blocks))
    wanted = [shuffled[row] for row in rows]
    again = pickle.loads(pickle.dumps(shuffled))
    assert [again[row] for row in reversed(rows)] == wanted[::-1]
    assert len(shuffled._epochs) <= 2
    monkeypatch.setattr(document_blocks, "CACHE_BYTES", 64)
    forgetful = ShuffledBlocks(blocks_of(texts(40)), seed=0)
    assert [forgetful[row] for row in rows] == wanted
    assert forgetful._blocks._recent_bytes <= 64 + 2 * 70  # the document being read is kept, however long


def test_most_documents_are_tokenised_once_in_an_epoch():
    class Counting(Texts):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    documents = Counting(f"{i:03d}" + "y" * 200 for i in range(100))
    blocks = blocks_of(documents)
    documents.reads = 0
    shuffled = ShuffledBlocks(blocks, seed=0)
    for row in range(len(blocks)):
        shuffled[row]
    assert documents.reads == 100


def open_parts(sources, *, size: int, index: int = 0, count: int = 1, seed: int = 0) -> pipeline.BlockIterator:
    return pipeline.block_batches(
        sources,
        weights=pipeline.token_shares((3.0, 1.0), list(sources)),
        batch_size=size,
        seed=seed,
        workers=0,
        process_index=index,
        process_count=count,
        content="test",
    )


@pytest.fixture(scope="module")
def sources() -> dict[str, DocumentBlocks]:
    """Two domains; the smaller one begins again within the steps of the tests."""
    return {"a": blocks_of(texts(60, mark="a")), "b": blocks_of(texts(8, seed=1, mark="b"))}


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_run_goes_on_with_any_number_of_processes(sources, before: int, after: int):
    """Stopped after each of seven steps: every step has the rows that it has without a stop, in the same order."""
    size, steps = 8, 10

    def hosts(count: int) -> list[pipeline.BlockIterator]:
        return [open_parts(sources, size=size // count, index=i, count=count) for i in range(count)]

    def step(of_hosts: list[pipeline.BlockIterator]) -> bytes:
        return b"".join(next(host)["tokens"].tobytes() for host in of_hosts)

    alone = hosts(1)
    order = [step(alone) for _ in range(steps)]
    assert len(set(order)) == steps
    for stop in range(7):
        first, second = hosts(before), hosts(after)
        rows = [step(first) for _ in range(stop)]
        states = [host.get_state() for host in first]
        assert all(state == states[0] for state in states)
        for host in second:
            host.set_state(states[0])
        assert rows + [step(second) for _ in range(steps - stop)] == order
        for host in (*first, *second):
            host.close()
    alone[0].close()


def test_documents_that_changed_since_they_were_counted_are_named():
    documents = texts(20)
    blocks = blocks_of(documents)
    documents[3] += "!"
    with pytest.raises(UserError, match=r"texts: document 3 has \d+ tokens, and \d+ were counted.*counts\.npz"):
        for index in range(len(blocks)):
            blocks[index]


# -------------------------------------------------------------------------------------------------------------- counts
def test_counts_are_of_every_document(monkeypatch: pytest.MonkeyPatch):
    documents = texts(50)
    counts = token_counts.count(documents, TOKENIZER)
    assert counts.lengths.tolist() == [len(text.encode()) + 2 if text else 0 for text in documents]
    assert all(counts.hashes[i] == hold_out.text_hash(text) for i, text in enumerate(documents) if text)
    monkeypatch.setattr(token_counts, "BATCH_CHARS", 10)
    assert token_counts.count(documents, TOKENIZER).digest == counts.digest
    monkeypatch.setattr(token_counts, "RANGE", 7)
    pieces = token_counts.count(documents, TOKENIZER)
    np.testing.assert_array_equal(pieces.lengths, counts.lengths)
    np.testing.assert_array_equal(pieces.hashes, counts.hashes)


def test_the_digest_is_of_the_content():
    digests = {token_counts.count(Texts(t), TOKENIZER).digest for t in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"])}
    assert len(digests) == 4


@pytest.mark.slow  # starts two processes
def test_counts_are_the_same_with_processes():
    documents = texts(3000)
    one, several = (token_counts.count(documents, TOKENIZER, workers=n) for n in (1, 2))
    assert one.digest == several.digest
    np.testing.assert_array_equal(one.lengths, several.lengths)


def test_counts_are_kept_and_a_damaged_file_is_made_again(tmp_path, monkeypatch: pytest.MonkeyPatch):
    documents, path = texts(30), tmp_path / "cache" / "counts.npz"
    first = token_counts.counted(path, documents, TOKENIZER, workers=0)
    with monkeypatch.context() as patch:
        patch.setattr(token_counts, "count", lambda *a, **k: pytest.fail("counted again"))
        kept = token_counts.counted(path, documents, TOKENIZER, workers=0)
    assert kept.digest == first.digest
    np.testing.assert_array_equal(kept.lengths, first.lengths)
    np.testing.assert_array_equal(kept.hashes, first.hashes)
    content = path.read_bytes()
    for damaged in (content[:100], b"", b"x" * 50):
        path.write_bytes(damaged)
        assert token_counts.counted(path, documents, TOKENIZER, workers=0).digest == first.digest
        assert path.read_bytes() == content
    # One document more than the file is about.
    assert len(token_counts.counted(path, texts(31), TOKENIZER, workers=0).lengths) == 31


def test_counts_that_cannot_be_kept(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot keep the counts of texts in .*config\.data\.cache_dir"):
        token_counts.counted(tmp_path / "file" / "counts.npz", texts(3), TOKENIZER, workers=0)
