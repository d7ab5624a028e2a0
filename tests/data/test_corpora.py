"""Test sets: directories of blocks besides the training corpus, whose domains a run is evaluated on."""

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
OWN = ("commoncrawl", "c4", "arxiv", "github", "stackexchange")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Other text, in a directory of its own."""
    return support.write_blocks(tmp_path_factory.mktemp("sets") / "long", seed=5)


def config(path: Path) -> DataConfig:
    return DataConfig(corpus="blocks", path=str(path), weights=(1.0, 2.0), train_domains=("commoncrawl", "c4"))


def test_a_corpus_with_test_sets_is_the_corpus_and_more(blocks_dir, other):
    alone = open_corpus(config(blocks_dir), **SIZES)
    corpus = open_corpus(config(blocks_dir), **SIZES, test_sets=[str(other)])
    assert corpus.eval_domains == (*OWN, *(f"long.{name}" for name in sorted(slimpajama.NAMES)))
    for field in ("train_domains", "in_domain", "weights", "tokens", "natural_shares", "manifest_hash"):
        assert getattr(corpus, field) == getattr(alone, field), field
    for domain in OWN:
        got, want = (c.eval_blocks(domain, count=5, seed=3) for c in (corpus, alone))
        assert (got.tokens == want.tokens).all()
    batches = [next(c.train_iterator(batch_size=4))["tokens"] for c in (corpus, alone)]
    assert (batches[0] == batches[1]).all()
    assert [corpus.side(d) for d in ("c4", "arxiv", "long.c4")] == ["in domain", "out of domain", "test set"]
    assert corpus.test_sets == {"long": open_corpus(config(other), **SIZES).manifest_hash}
    assert corpus.test_sets["long"] != corpus.manifest_hash


def test_all_blocks_of_a_test_set_may_be_chosen(blocks_dir, other):
    """Also those of its train split, in a domain of the same name as one that is trained on."""
    corpus = open_corpus(config(blocks_dir), **SIZES, test_sets=[str(other)])
    tokens = corpus.eval_blocks("long.c4", count=10**6).tokens
    assert len(tokens) == 96 + 12
    whole = np.concatenate([corpus.eval_blocks("c4", count=10**6).tokens, corpus.train_sample("c4", count=10**6)])
    assert not {row.tobytes() for row in tokens} & {row.tobytes() for row in whole}


def test_test_sets_alone_need_no_corpus(other, tmp_path):
    corpus = open_test_sets(config(tmp_path / "gone"), [str(other)], **SIZES)
    assert corpus.eval_domains == tuple(f"long.{name}" for name in sorted(slimpajama.NAMES))
    assert not corpus.in_domain
    assert not corpus.natural_shares


def test_what_cannot_be_a_test_set(blocks_dir, other, tmp_path):
    def opened(*paths: Path, **sizes: int):
        return open_corpus(config(blocks_dir), **SIZES | sizes, test_sets=[str(path) for path in paths])

    same = shutil.copytree(other, tmp_path / "long")
    with pytest.raises(UserError, match=r"are both named 'long'.*rename one of the directories"):
        opened(other, same)
    with pytest.raises(UserError, match="nowhere"):
        opened(tmp_path / "nowhere")
    manifest = json.loads((same / "manifest.json").read_text())
    manifest["tokenizer"] |= {"name": "mixtral", "sha256": "0" * 64}
    (same / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"long were made with the mixtral tokenizer"):
        opened(same)
