"""Remote data: blocks are read through a local copy, shards directly."""

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
    """The names of the downloaded objects."""
    names: list[str] = []
    download = store.download

    def recording_download(url, path):
        names.append(url.rpartition("/")[2])
        download(url, path)

    monkeypatch.setattr(store, "download", recording_download)
    return names


def test_only_used_blocks_are_copied_once(memory, blocks_dir, downloads, own_cache):
    url = put(blocks_dir, f"{memory}/blocks")
    local, remote = open_corpus(config(blocks_dir), **SIZES), open_corpus(config(url), **SIZES)
    assert remote.manifest_hash == local.manifest_hash
    for domain in local.eval_domains:
        actual, expected = (corpus.eval_blocks(domain, count=4) for corpus in (remote, local))
        np.testing.assert_array_equal(actual.tokens, expected.tokens)
        np.testing.assert_array_equal(actual.documents, expected.documents)
    for actual, expected in zip(first_batches(config(url)), first_batches(config(blocks_dir)), strict=True):
        np.testing.assert_array_equal(actual, expected)
    left_out = set(NAMES) - {*local.train_domains, *local.eval_domains}
    assert left_out
    assert not [name for name in downloads if name.startswith(tuple(left_out))]
    assert downloads.count("c4-00000.array_record") == 2  # train and validation, though it was opened twice
    assert [path.name for path in own_cache.joinpath("seqjax").iterdir()] == ["blocks"]


def test_incomplete_cache_files_are_replaced(memory, blocks_dir, tmp_path, downloads):
    settings = config(put(blocks_dir, f"{memory}/blocks"), cache_dir=str(tmp_path / "mine"))
    complete = first_batches(settings)
    (root,) = (tmp_path / "mine" / "blocks").iterdir()
    (root / "train" / ".c4-00000.array_record.0.tmp").write_bytes(b"half")
    file = root / "train" / "c4-00000.array_record"
    file.write_bytes(file.read_bytes()[:100])
    downloads.clear()
    for actual, expected in zip(first_batches(settings), complete, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert downloads == ["c4-00000.array_record"]
    assert not list(root.rglob(".*.tmp"))


def test_changed_data_under_a_url_is_copied_again(memory, blocks_dir, corpus_dir, tmp_path):
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


def test_store_errors_name_the_url(memory, blocks_dir, monkeypatch):
    with pytest.raises(UserError, match=f"config.data.path: no directory {memory}/none"):
        open_corpus(config(f"{memory}/none"), **SIZES)
    store.write(f"{memory}/empty/x", b"")
    with pytest.raises(UserError, match=f"{memory}/empty has no manifest.json"):
        open_corpus(config(f"{memory}/empty"), **SIZES)
    url = put(blocks_dir, f"{memory}/blocks")
    with monkeypatch.context() as patch:
        patch.setattr(block_cache.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10))
        with pytest.raises(UserError, match=rf"{url} .*0\.0 GB.*config\.data\.cache_dir"):
            open_corpus(config(url), **SIZES)
    name = "train/c4-00000.array_record"
    store.write(f"{url}/{name}", b"short")
    with pytest.raises(UserError, match=rf"{url}/{name} .*damaged: .*\b5 bytes"):
        open_corpus(config(url), **SIZES)
    store.remove(f"{url}/{name}")
    with pytest.raises(UserError, match=f"{url}/{name} is missing"):
        open_corpus(config(url), **SIZES)


def test_test_set_is_named_after_its_url(memory, blocks_dir):
    url = put(blocks_dir, f"{memory}/long")
    corpus = open_test_sets(DataConfig(), [url], **SIZES)
    assert {name.split(".")[0] for name in corpus.eval_domains} == {"long"}


def copy(url: str, cache: str) -> None:
    """Copy blocks in a separate process."""
    block_cache.copied(url, manifests.read_manifest(url), NAMES, cache_dir=cache)


@pytest.mark.slow  # Three processes start.
def test_processes_share_one_copy(blocks_dir, tmp_path):
    context = multiprocessing.get_context("spawn")
    url = f"file://{blocks_dir}"
    processes = [context.Process(target=copy, args=(url, str(tmp_path))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    (root,) = (tmp_path / "blocks").iterdir()
    actual, expected = contents(root), contents(blocks_dir)
    assert {name: actual[name] for name in expected if name != "manifest.json"} == {
        name: content for name, content in expected.items() if name != "manifest.json"
    }
    assert set(actual) - set(expected) == {".lock"}


def test_server_data_equals_local_data(server, blocks_dir, corpus_dir, tmp_path):
    """A run reads the blocks; `prepare` and a stream read the shards."""
    url = put(blocks_dir, f"{server.url}/blocks")
    for actual, expected in zip(first_batches(config(url)), first_batches(config(blocks_dir)), strict=True):
        np.testing.assert_array_equal(actual, expected)
    source = put(corpus_dir, f"{server.url}/text")
    prepared(source, tmp_path / "remote")
    prepared(corpus_dir, tmp_path / "local")
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")
    assert [shard.name for shard in find_shards(f"{source}/train/*.zst")] == [
        f"example_{i}.jsonl.zst" for i in range(3)
    ]
    stream = DataConfig(corpus="stream", path=source)
    for actual, expected in zip(
        first_batches(stream), first_batches(dataclasses.replace(stream, path=str(corpus_dir))), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def test_store_failure_is_not_a_torn_shard(memory, corpus_dir, monkeypatch):
    """A torn shard would silently lose the unread documents."""
    source = put(corpus_dir, f"{memory}/text")
    shard = find_shards(source)[0]
    skipped = Skipped(shard.name)
    assert list(documents(shard, (), skipped))
    read = store._Reader.read

    def fails(self, *args):
        if self.tell() > 0:
            raise store.StoreError("connection lost")
        return read(self, 100)

    monkeypatch.setattr(store._Reader, "read", fails)
    with pytest.raises(UserError, match="connection lost"):
        list(documents(shard, (), skipped))
    assert not skipped.reasons
