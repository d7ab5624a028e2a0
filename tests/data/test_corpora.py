"""Test sets: additional block directories for evaluation."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from seqjax.config import DataConfig
from seqjax.data import open_corpus, open_test_sets, slimpajama
from seqjax.errors import UserError
from tests import support

SIZES = {"seq_len": support.SEQ_LEN, "vocab_size": 258}
CORPUS_DOMAINS = ("commoncrawl", "c4", "arxiv", "github", "stackexchange")


@pytest.fixture(scope="module")
def long_set(tmp_path_factory) -> Path:
    """Blocks of other text in a directory called "long"."""
    return support.write_blocks(tmp_path_factory.mktemp("sets") / "long", seed=5)


def config(path: Path) -> DataConfig:
    return DataConfig(corpus="blocks", path=str(path), weights=(1.0, 2.0), train_domains=("commoncrawl", "c4"))


def test_test_sets_add_domains_without_changing_the_corpus(blocks_dir, long_set):
    plain = open_corpus(config(blocks_dir), **SIZES)
    corpus = open_corpus(config(blocks_dir), **SIZES, test_sets=[str(long_set)])
    assert corpus.eval_domains == (*CORPUS_DOMAINS, *(f"long.{name}" for name in sorted(slimpajama.NAMES)))
    for field in ("train_domains", "in_domain", "weights", "tokens", "natural_shares", "manifest_hash"):
        assert getattr(corpus, field) == getattr(plain, field), field
    for domain in CORPUS_DOMAINS:
        actual, expected = (c.eval_blocks(domain, count=5, seed=3) for c in (corpus, plain))
        assert (actual.tokens == expected.tokens).all()
    batches = [next(c.train_iterator(batch_size=4))["tokens"] for c in (corpus, plain)]
    assert (batches[0] == batches[1]).all()
    assert [corpus.side(d) for d in ("c4", "arxiv", "long.c4")] == ["in domain", "out of domain", "test set"]
    assert corpus.test_sets == {"long": open_corpus(config(long_set), **SIZES).manifest_hash}
    assert corpus.test_sets["long"] != corpus.manifest_hash


def test_test_set_evaluation_uses_both_splits(blocks_dir, long_set):
    """The train split is included, even if a training domain has the same name."""
    corpus = open_corpus(config(blocks_dir), **SIZES, test_sets=[str(long_set)])
    tokens = corpus.eval_blocks("long.c4", count=10**6).tokens
    assert len(tokens) == 96 + 12
    blocks = [corpus.eval_blocks("c4", count=10**6).tokens, corpus.train_sample("c4", count=10**6)]
    assert not {row.tobytes() for row in tokens} & {row.tobytes() for row in np.concatenate(blocks)}


def test_open_test_sets_needs_no_training_corpus(long_set, tmp_path):
    corpus = open_test_sets(config(tmp_path / "gone"), [str(long_set)], **SIZES)
    assert corpus.eval_domains == tuple(f"long.{name}" for name in sorted(slimpajama.NAMES))
    assert not corpus.in_domain
    assert not corpus.natural_shares


def test_invalid_test_sets_are_refused(blocks_dir, long_set, tmp_path):
    def opened(*paths: Path, **sizes: int):
        return open_corpus(config(blocks_dir), **SIZES | sizes, test_sets=[str(path) for path in paths])

    same_name = shutil.copytree(long_set, tmp_path / "long")
    with pytest.raises(UserError, match=r"config\.eval\.path .*'long'"):
        opened(long_set, same_name)
    with pytest.raises(UserError, match="nowhere"):
        opened(tmp_path / "nowhere")
    manifest = json.loads((same_name / "manifest.json").read_text())
    manifest["tokenizer"] |= {"name": "mixtral", "sha256": "0" * 64}
    (same_name / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"long .*\bmixtral\b"):
        opened(same_name)
