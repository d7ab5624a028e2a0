"""Data in a store: blocks are read through a copy, shards directly; both as if they were here."""

import dataclasses
import multiprocessing
import shutil

import numpy as np
import pytest

from seqjax import store
from seqjax.config import DataConfig
from seqjax.data import block_cache, manifests, open_corpus, open_test_sets
from seqjax.data.shards import Skipped, documents, find_shards
from seqjax.data.slimpajama import NAMES
from seqjax.errors import UserError
from tests.data.conftest import contents, prepared
from tests.support import put

SIZES = {"seq_len": 32, "vocab_size": 512}


def config(path: object, **changes: object) -> DataConfig:
    return dataclasses.replace(DataConfig(corpus="blocks", path=str(path)), **changes)


def first_batches(settings: DataConfig, count: int = 3) -> list[np.ndarray]:
    iterator = open_corpus(settings, **SIZES).train_iterator(batch_size=4)
    batches = [next(iterator)["tokens"] for _ in range(count)]
    iterator.close()
    return batches


@pytest.fixture
def downloads(monkeypatch):
    """Names of the objects that were copied."""
    names: list[str] = []
    download = store.download

    def listening(url, path):
        names.append(url.rpartition("/")[2])
        download(url, path)

    monkeypatch.setattr(store, "download", listening)
    return names


def test_blocks_are_copied_once_and_only_those_that_are_read(memory, blocks_dir, downloads, own_cache):
    url = put(blocks_dir, f"{memory}/blocks")
    here, there = open_corpus(config(blocks_dir), **SIZES), open_corpus(config(url), **SIZES)
    assert there.manifest_hash == here.manifest_hash
    for domain in here.eval_domains:
        got, want = (corpus.eval_blocks(domain, count=4) for corpus in (there, here))
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.documents, want.documents)
    for got, want in zip(first_batches(config(url)), first_batches(config(blocks_dir)), strict=True):
        np.testing.assert_array_equal(got, want)
    left_out = set(NAMES) - {*here.train_domains, *here.eval_domains}
    assert left_out
    assert not [name for name in downloads if name.startswith(tuple(left_out))]
    assert downloads.count("c4-00000.array_record") == 2  # train and validation, though it was opened twice
    assert [path.name for path in own_cache.joinpath("seqjax").iterdir()] == ["blocks"]


def test_what_is_cut_short_or_left_over_in_the_cache_is_mended(memory, blocks_dir, tmp_path, downloads):
    settings = config(put(blocks_dir, f"{memory}/blocks"), cache_dir=str(tmp_path / "mine"))
    wanted = first_batches(settings)
    (root,) = (tmp_path / "mine" / "blocks").iterdir()
    (root / "train" / ".c4-00000.array_record.0.tmp").write_bytes(b"half")
    file = root / "train" / "c4-00000.array_record"
    file.write_bytes(file.read_bytes()[:100])
    downloads.clear()
    for got, want in zip(first_batches(settings), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    assert downloads == ["c4-00000.array_record"]
    assert not list(root.rglob(".*.tmp"))


def test_other_data_under_the_same_url_is_another_copy(memory, blocks_dir, corpus_dir, tmp_path):
    url = put(blocks_dir, f"{memory}/blocks")
    first = first_batches(config(url))
    prepared(
        corpus_dir, tmp_path / "other", seq_len=32, domains=["c4", "commoncrawl", "arxiv", "github"], max_tokens=50
    )
    for name in store.sizes(url):
        store.remove(f"{url}/{name}")
    put(tmp_path / "other", url)
    again = first_batches(config(url, eval_domains=("c4",)))
    assert any((a != b).any() for a, b in zip(first, again, strict=True))


def test_what_is_wrong_in_the_store_is_named(memory, blocks_dir, monkeypatch):
    with pytest.raises(UserError, match=f"no directory {memory}/none; make it with `seqjax prepare`, and copy"):
        open_corpus(config(f"{memory}/none"), **SIZES)
    store.write(f"{memory}/empty/x", b"")
    with pytest.raises(UserError, match=f"{memory}/empty has no manifest.json"):
        open_corpus(config(f"{memory}/empty"), **SIZES)
    url = put(blocks_dir, f"{memory}/blocks")
    with monkeypatch.context() as patch:
        patch.setattr(block_cache.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
        with pytest.raises(
            UserError, match=rf"reads of {url} take 0\.0 GB, 0\.0 GB are free in .*config.data.cache_dir"
        ):
            open_corpus(config(url), **SIZES)
    name = "train/c4-00000.array_record"
    store.write(f"{url}/{name}", b"short")
    with pytest.raises(UserError, match=rf"{url}/{name} is damaged: it has 5 bytes, \d+ were written"):
        open_corpus(config(url), **SIZES)
    store.remove(f"{url}/{name}")
    with pytest.raises(UserError, match=f"{url}/{name} is missing"):
        open_corpus(config(url), **SIZES)


def test_a_test_set_is_named_after_its_url(memory, blocks_dir):
    url = put(blocks_dir, f"{memory}/long")
    corpus = open_test_sets(DataConfig(), [url], **SIZES)
    assert {name.split(".")[0] for name in corpus.eval_domains} == {"long"}


def copy(url: str, cache: str) -> None:
    """Of a process of its own."""
    block_cache.copied(url, manifests.read_manifest(url), NAMES, cache_dir=cache)


@pytest.mark.slow  # Three processes start.
def test_processes_share_a_copy(blocks_dir, tmp_path):
    context = multiprocessing.get_context("spawn")
    url = f"file://{blocks_dir}"
    processes = [context.Process(target=copy, args=(url, str(tmp_path))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    (root,) = (tmp_path / "blocks").iterdir()
    got, want = contents(root), contents(blocks_dir)
    assert {name: got[name] for name in want if name != "manifest.json"} == {
        name: content for name, content in want.items() if name != "manifest.json"
    }
    assert set(got) - set(want) == {".lock"}


def test_blocks_and_shards_of_a_server(server, blocks_dir, corpus_dir, tmp_path):
    """Blocks as a run reads them, shards as `prepare` and a stream do."""
    url = put(blocks_dir, f"{server.url}/blocks")
    for got, want in zip(first_batches(config(url)), first_batches(config(blocks_dir)), strict=True):
        np.testing.assert_array_equal(got, want)
    source = put(corpus_dir, f"{server.url}/text")
    prepared(source, tmp_path / "there")
    prepared(corpus_dir, tmp_path / "here")
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert [shard.name for shard in find_shards(f"{source}/train/*.zst")] == [
        f"example_{i}.jsonl.zst" for i in range(3)
    ]
    stream = DataConfig(corpus="stream", path=source)
    for got, want in zip(
        first_batches(stream), first_batches(dataclasses.replace(stream, path=str(corpus_dir))), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_a_store_that_fails_is_not_a_torn_shard(memory, corpus_dir, monkeypatch):
    """What it had not given yet would be missing without a word."""
    source = put(corpus_dir, f"{memory}/text")
    shard = find_shards(source)[0]
    skipped = Skipped(shard.name)
    assert list(documents(shard, (), skipped))
    read = store._Reader.read

    def fails(self, *args):
        if self.tell() > 0:
            raise store.StoreError("the line is dead")
        return read(self, 100)

    monkeypatch.setattr(store._Reader, "read", fails)
    with pytest.raises(UserError, match="the line is dead"):
        list(documents(shard, (), skipped))
    assert not skipped.reasons
