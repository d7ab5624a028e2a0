"""Prepared blocks store byte counts; training needs no tokenizer package."""

import re
import sys

import numpy as np
import pytest

from seqjax.config import DataConfig
from seqjax.data import load_tokenizer, open_corpus, stored_tokenizer
from seqjax.data.corpus import block_bytes
from seqjax.data.stored_tokenizer import StoredTokenizer
from seqjax.data.tokenizer import with_specials
from seqjax.errors import MissingPackageError, UserError
from tests import extras, support
from tests.data.conftest import prepared
from tests.import_filter import finders

PACKAGES = ("sentencepiece", "mistral_common")
DOMAINS = {"train_domains": ("c4",), "eval_domains": ("c4", "arxiv")}
BLOCKED = f"""
import runpy, sys
from tests.import_filter import finders
sys.meta_path[:] = finders(lambda name: name not in {PACKAGES})
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def mixtral_dir(corpus_dir, tmp_path_factory):
    """Blocks that were made with the Mixtral tokenizer."""
    extras.need("mistral_common")
    out = tmp_path_factory.mktemp("mixtral") / "out"
    prepared(corpus_dir, out, tokenizer="mixtral", seq_len=32)
    return out


@pytest.fixture
def without_packages(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", finders(lambda name: name not in PACKAGES))
    load_tokenizer.cache_clear()
    yield
    load_tokenizer.cache_clear()


def settings(directory, **changes):
    return DataConfig(**({"corpus": "blocks", "path": str(directory), "tokenizer": "mixtral"} | DOMAINS | changes))


def test_stored_fields_equal_the_tokenizer(mixtral_dir):
    tokenizer = load_tokenizer("mixtral")
    stored = stored_tokenizer.read(mixtral_dir / stored_tokenizer.FILE, why="why")
    for name in ("name", "hash", "vocab_size", "bos", "eos", "adds_space"):
        assert getattr(stored, name) == getattr(tokenizer, name), name
    np.testing.assert_array_equal(stored.n_bytes, tokenizer.n_bytes)
    for call in (lambda: stored.encode("a"), lambda: stored.encode_batch(["a"]), lambda: stored.decode([5])):
        with pytest.raises(MissingPackageError, match="why"):
            call()


def test_start_id_0_is_stored(tmp_path):
    """The space that the tokenizer adds after the start token is not counted."""
    sizes = np.array([0, 0, 3, 5], np.int64)
    written = StoredTokenizer(name="n", hash="h", bos=0, eos=1, n_bytes=sizes, adds_space=True, why="why")
    stored_tokenizer.write(tmp_path / "tokenizer.npz", written)
    stored = stored_tokenizer.read(tmp_path / "tokenizer.npz", why="why")
    assert (stored.bos, stored.eos, stored.adds_space) == (0, 1, True)
    assert with_specials(stored, np.array([2, 3])).tolist() == [0, 2, 3, 1]
    blocks = np.array([[0, 2, 3, 1, 0, 3], [3, 1, 0, 1, 0, 2]])
    assert block_bytes(blocks, stored).tolist() == [3 + 5 + 5 - 2, 3 - 1]


def test_blocks_open_without_the_packages(mixtral_dir, request):
    with_package = open_corpus(settings(mixtral_dir), seq_len=32, vocab_size=32_000)
    expected = with_package.eval_blocks("arxiv", count=5)
    request.getfixturevalue("without_packages")
    corpus = open_corpus(settings(mixtral_dir), seq_len=32, vocab_size=32_000)
    assert isinstance(corpus.tokenizer, stored_tokenizer.StoredTokenizer)
    assert corpus.manifest_hash == with_package.manifest_hash
    actual = corpus.eval_blocks("arxiv", count=5)
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    np.testing.assert_array_equal(actual.n_bytes, expected.n_bytes)
    iterator = corpus.train_iterator(batch_size=2)
    assert next(iterator)["tokens"].shape == (2, 33)
    iterator.close()
    with pytest.raises(MissingPackageError, match="needs sentencepiece"):
        corpus.tokenizer.encode("text")


def test_other_uses_need_the_packages(mixtral_dir, blocks_dir, tmp_path, without_packages):
    message = "mixtral .*sentencepiece"
    with pytest.raises(MissingPackageError, match=message):
        open_corpus(settings(mixtral_dir, corpus="stream"), seq_len=32, vocab_size=32_000)
    with pytest.raises(MissingPackageError, match=message):  # these blocks have byte ids
        open_corpus(settings(blocks_dir), seq_len=32, vocab_size=32_000)
    with pytest.raises(UserError, match=r"config\.data\.path: no directory .*nothing"):
        open_corpus(settings(tmp_path / "nothing"), seq_len=32, vocab_size=32_000)
    (tmp_path / "other.model").write_bytes(b"another vocabulary")
    with pytest.raises(MissingPackageError, match=message):
        open_corpus(settings(mixtral_dir, tokenizer_path=str(tmp_path / "other.model")), seq_len=32, vocab_size=32_000)
    with pytest.raises(UserError, match=r"32000 ids.*config\.model\.vocab_size"):
        open_corpus(settings(mixtral_dir), seq_len=32, vocab_size=1000)


def test_damaged_file_is_refused_and_deleted_file_is_rewritten(corpus_dir, tmp_path):
    out = tmp_path / "out"
    prepared(corpus_dir, out, domains=("c4",))
    path = out / stored_tokenizer.FILE
    content = path.read_bytes()
    path.write_bytes(content[:100])
    with pytest.raises(UserError, match=r"tokenizer\.npz is damaged"):
        stored_tokenizer.read(path, why="")
    path.unlink()
    prepared(corpus_dir, out, domains=("c4",))
    assert path.read_bytes() == content


@pytest.mark.slow
def test_training_and_evaluation_work_without_the_packages(mixtral_dir, tmp_path):
    """With the packages blocked, only text generation is refused."""
    overrides = {"train.steps": 2, "train.seq_len": 32, "train.batch_size": 4, "eval.tokens": 64, "model.dim": 32}
    argument = ",".join(["debug", *(f"{key}={value}" for key, value in overrides.items())])
    workdir = tmp_path / "run"

    def command(module, *args):
        return support.run([sys.executable, "-c", BLOCKED, module, *args])

    data = ["corpus=blocks", "tokenizer=mixtral", f"path={mixtral_dir}"]
    flags = [f"--config.data.{setting}" for setting in data] + ["--config.model.vocab_size=32000"]
    trained = command("seqjax.main", f"--config=transformer_pp:{argument}", f"--workdir={workdir}", *flags)
    assert trained.returncode == 0, trained.stderr
    assert "needs sentencepiece" in trained.stderr
    assert "A sample" not in (workdir / "report.md").read_text()
    evaluated = command("seqjax.evaluate", f"--workdir={workdir}")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "bits_per_byte" in (workdir / "evaluation.json").read_text()
    refused = command("seqjax.generate", f"--workdir={workdir}")
    assert refused.returncode == 2
    assert re.match("error: .* needs sentencepiece", refused.stderr.splitlines()[-1])
    assert "Traceback" not in refused.stderr
