"""The built-in corpus: reproducible, split by package, safe in concurrent builds."""

import dataclasses
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

from seqjax.config import DataConfig
from seqjax.data import document_sources, open_corpus, pipeline
from seqjax.data.builtin import corpus as builtin
from seqjax.data.builtin import extract
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError
from tests import support


@pytest.fixture(scope="module")
def documents() -> list[extract.Document]:
    return extract.documents(extract.distributions())


@pytest.fixture
def extracted(documents: list[extract.Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """Build from the extracted documents instead of extracting them again."""
    monkeypatch.setattr(extract, "documents", lambda dists: documents)


@pytest.fixture(scope="module")
def cache(corpus_cache: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache for this module with a copy of the corpus that other tests built."""
    built = builtin.build(ByteTokenizer(), cache_dir=corpus_cache)
    directory = tmp_path_factory.mktemp("cache")
    shutil.copytree(built, directory / built.name)
    return str(directory)


@pytest.mark.slow
def test_build_is_reproducible(cache: str, tmp_path: Path):
    config = DataConfig(cache_dir=cache)
    first = open_corpus(config, seq_len=128, vocab_size=258)
    again = open_corpus(config, seq_len=64, vocab_size=258)
    rebuilt = open_corpus(dataclasses.replace(config, cache_dir=str(tmp_path)), seq_len=128, vocab_size=258)
    assert first.manifest_hash == again.manifest_hash == rebuilt.manifest_hash
    (first_directory,) = Path(cache).iterdir()
    (second_directory,) = tmp_path.iterdir()
    assert first_directory.name == second_directory.name
    for path in first_directory.iterdir():
        assert path.read_bytes() == (second_directory / path.name).read_bytes()


def test_distributions_include_every_requirement():
    requirements = tomllib.loads((support.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", requirement)[0].replace("_", "-").lower() for requirement in requirements}
    assert {"jax", "scipy", "ml-collections"} <= names <= extract.distributions().keys()


def test_corpus_has_documented_domains_and_size(cache: str):
    corpus = open_corpus(DataConfig(cache_dir=cache), seq_len=128, vocab_size=258)
    assert corpus.name == "builtin"
    assert corpus.train_domains == ("prose", "doctest")
    assert corpus.eval_domains == ("prose", "doctest", "math_docs", "python", "c_code")
    assert "not SlimPajama" in corpus.note
    assert sum(corpus.tokens.values()) > 5_000_000
    for domain in corpus.eval_domains:
        blocks = corpus.eval_blocks(domain, count=10_000).tokens
        assert len(blocks) * 128 >= 100_000
        assert blocks.max() < 258
    loss = corpus.bigram_loss()
    assert loss is not None
    assert 2.0 < loss < 3.5
    iterator = corpus.train_iterator(batch_size=4)
    text = corpus.tokenizer.decode(next(iterator)["tokens"].ravel())
    iterator.close()
    assert text.isprintable() or "\n" in text


def test_documents_are_enclosed_in_bos_and_eos(cache: str):
    corpus = open_corpus(DataConfig(cache_dir=cache), seq_len=128, vocab_size=258)
    bos, eos = corpus.tokenizer.bos, corpus.tokenizer.eos
    for rows in (corpus.train_sample("doctest", count=10**6), corpus.eval_blocks("math_docs", count=10**6).tokens):
        assert rows[0, 0] == bos
        pairs = np.stack([rows[:, :-1].ravel(), rows[:, 1:].ravel()])
        begins, ends = pairs[1] == bos, pairs[0] == eos
        assert begins.sum() > 30
        np.testing.assert_array_equal(begins, ends)


def test_data_settings_change_the_batches(cache: str):
    def rows(**settings) -> np.ndarray:
        corpus = open_corpus(DataConfig(cache_dir=cache, **settings), seq_len=512, vocab_size=258)
        iterator = corpus.train_iterator(batch_size=50)
        assert isinstance(iterator, pipeline.TrainIterator)
        identity = iterator.get_state()["identity"]
        assert identity["seed"] == settings.get("seed", 0)
        batch = next(iterator)["tokens"]
        iterator.close()
        return batch

    plain = rows()
    np.testing.assert_array_equal(plain, rows())
    assert (plain != rows(seed=1)).any()
    chosen = {"train_domains": ("c_code", "doctest"), "weights": (0.2, 0.8)}
    corpus = open_corpus(DataConfig(cache_dir=cache, **chosen), seq_len=512, vocab_size=258)
    c_code_blocks = {row.astype("<u2").tobytes() for row in corpus.train_sample("c_code", count=10**6)}
    assert abs(sum(row.astype("<u2").tobytes() in c_code_blocks for row in rows(**chosen)) - 0.2 * 50) <= 1


def test_documents_match_their_domains(documents: list[extract.Document]):
    domains = {document.domain for document in documents}
    assert domains == set(extract.DOMAINS)
    texts = [document.digest for document in documents]
    assert len(set(texts)) == len(texts)
    for document in documents:
        if document.domain == "doctest":
            assert document.text.count(">>>") >= 3
        elif document.domain == "math_docs":
            assert document.text.count(":math:") + document.text.count(".. math::") >= 2
    assert sum(len(d.text) for d in documents if d.domain == "python") < 1.1 * extract.CAPS["python"]


def test_python_domain_has_no_docstrings(documents: list[extract.Document]):
    """Docstrings are training prose and must not occur in the OOD domain `python`."""
    prose = {d.text.splitlines()[0] for d in documents if d.domain == "prose" and len(d.text.splitlines()[0]) > 60}
    files = [d for d in documents if d.domain == "python"]
    seen = sum(any(line.strip().strip('"') in prose for line in d.text.splitlines()) for d in files)
    assert seen < 0.1 * len(files)


def test_held_out_packages_have_the_configured_share(documents: list[extract.Document]):
    held = builtin.held_out_packages(documents)
    assert held
    for domain in ("prose", "doctest"):
        total = sum(len(d.text) for d in documents if d.domain == domain)
        inside = sum(len(d.text) for d in documents if d.domain == domain and d.package in held)
        assert 0.03 * total < inside < 0.1 * total


def test_split_follows_packages(tmp_path: Path, documents: list[extract.Document]):
    some = documents[::8]
    held = builtin.held_out_packages(some)
    builtin._write(tmp_path, some, ByteTokenizer())
    train = (tmp_path / "train-prose.uint16").read_bytes()
    validation = (tmp_path / "validation-prose.uint16").read_bytes()
    prose = [d for d in some if d.domain == "prose"][::5]
    assert {document.package in held for document in prose} == {True, False}
    for document in prose:
        encoded = ByteTokenizer().encode(document.text).astype("<u2").tobytes()
        assert (encoded in validation) == (document.package in held)
        assert (encoded in train) == (document.package not in held)


@pytest.mark.usefixtures("extracted")
def test_concurrent_build_is_reused(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process finishes the same corpus while this process builds it."""
    built = builtin.build(ByteTokenizer(), cache_dir=cache)
    real = builtin._write

    def write(directory: Path, documents: list[extract.Document], tokenizer: ByteTokenizer) -> None:
        real(directory, [], tokenizer)
        shutil.copytree(built, tmp_path / built.name)

    monkeypatch.setattr(builtin, "_write", write)
    assert builtin.build(ByteTokenizer(), cache_dir=str(tmp_path)) == tmp_path / built.name
    assert [path.name for path in tmp_path.iterdir()] == [built.name]


@pytest.mark.parametrize("name", ["train-prose.uint16", "manifest.json", "documents.npz", "sources.npz"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "delete"])
def test_damaged_cache_is_rebuilt(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents, caplog
):
    few = [d for domain in extract.DOMAINS for d in [d for d in documents if d.domain == domain][:40]]
    monkeypatch.setattr(extract, "documents", lambda dists: few)
    directory = builtin.build(ByteTokenizer(), cache_dir=str(tmp_path))
    undamaged = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert builtin.build(ByteTokenizer(), cache_dir=str(tmp_path)) == directory and not caplog.records
    content = bytearray(undamaged[name])
    content[len(content) // 2] ^= 1
    (directory / name).write_bytes({"flip": content, "cut": undamaged[name][:-7]}.get(damage, b""))
    if damage == "delete":
        (directory / name).unlink()
    assert builtin.build(ByteTokenizer(), cache_dir=str(tmp_path)) == directory
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == undamaged
    assert any("is damaged" in record.getMessage() for record in caplog.records)


def test_recorded_hash_selects_the_old_text(cache: str, documents, monkeypatch: pytest.MonkeyPatch):
    """After a package upgrade, a resumed run reads the old text."""
    sizes = {"seq_len": 128, "vocab_size": 258}
    then = open_corpus(DataConfig(cache_dir=cache), **sizes)
    changed = extract.distributions()
    del changed["zstandard"]
    monkeypatch.setattr(extract, "distributions", lambda: changed)
    monkeypatch.setattr(extract, "documents", lambda dists: documents[1:])
    assert (
        open_corpus(DataConfig(cache_dir=cache), recorded=then.manifest_hash, **sizes).manifest_hash
        == then.manifest_hash
    )
    now = open_corpus(DataConfig(cache_dir=cache), recorded="0" * 64, **sizes).manifest_hash
    assert now == open_corpus(DataConfig(cache_dir=cache), **sizes).manifest_hash != then.manifest_hash


def test_document_source_is_its_package(tmp_path: Path, documents: list[extract.Document]):
    some = documents[::40]
    builtin._write(tmp_path, some, ByteTokenizer())
    arrays = document_sources.read(tmp_path / document_sources.FILE)
    with np.load(tmp_path / "documents.npz") as file:
        lengths = {split: file[f"{split}/python"] for split in ("train", "validation")}
    members = [d for d in some if d.domain == "python"]
    assert len({d.package for d in members}) > 3
    for split, first in (("validation", 0), ("train", 1)):
        chosen = members[first::2]
        assert lengths[split].tolist() == [len(d.text.encode()) + 2 for d in chosen]
        keys = {f"{split}/python": len(chosen)}
        names = document_sources.names_of(arrays, "python", keys, np.arange(len(chosen)))
        assert names == [d.package for d in chosen]


def test_evaluation_block_sources_are_packages(cache: str):
    corpus = open_corpus(DataConfig(cache_dir=cache), seq_len=128, vocab_size=258)
    held_out = corpus.eval_blocks("prose", count=50)
    every = corpus.eval_blocks("c_code", count=10**6)
    assert held_out.sources is not None
    assert every.sources is not None
    # A document has one source, and packages have several documents.
    assert 1 < len(set(held_out.sources)) < len(set(held_out.documents))
    assert len(set(zip(every.documents, every.sources, strict=True))) == len(set(every.documents))
    assert document_sources.number("python/include") in every.sources


def test_cache_without_sources_can_be_resumed(cache: str, tmp_path: Path):
    built = builtin.build(ByteTokenizer(), cache_dir=cache)
    shutil.copytree(built, tmp_path / "builtin-byte-0")
    (tmp_path / "builtin-byte-0" / document_sources.FILE).unlink()
    digest = builtin.read_manifest(built)["hash"]
    config = DataConfig(cache_dir=str(tmp_path))
    corpus = open_corpus(config, seq_len=128, vocab_size=258, recorded=digest)
    assert corpus.manifest_hash == digest
    assert corpus.eval_blocks("prose", count=5).sources is None
    assert [path.name for path in tmp_path.iterdir()] == ["builtin-byte-0"]


@pytest.mark.usefixtures("extracted")
def test_unwritable_cache_names_the_setting(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"config\.data\.cache_dir"):
        builtin.build(ByteTokenizer(), cache_dir=str(tmp_path / "file"))


def test_configured_domains_replace_the_regime(cache: str):
    config = DataConfig(cache_dir=cache, regime="mixed", eval_domains=("c_code",))
    corpus = open_corpus(config, seq_len=128, vocab_size=300)
    assert corpus.train_domains == extract.DOMAINS
    assert corpus.in_domain == {"c_code"}
    with pytest.raises(UserError, match=r"config\.data\.eval_domains: 'arxiv'"):
        open_corpus(DataConfig(cache_dir=cache, eval_domains=("arxiv",)), seq_len=128, vocab_size=258)


def test_mixed_regime_separates_train_and_validation(cache: str):
    corpus = open_corpus(DataConfig(cache_dir=cache, regime="mixed"), seq_len=512, vocab_size=258)
    for domain in corpus.eval_domains:
        validation = {b.tobytes() for b in corpus.eval_blocks(domain, count=10_000).tokens}
        train = {b.tobytes() for b in corpus.train_sample(domain, count=10_000)}
        assert not validation & train
    assert np.isfinite(corpus.bigram_loss() or np.nan)
