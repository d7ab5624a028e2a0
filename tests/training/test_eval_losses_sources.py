"""Runs store the source of each evaluated block, if the prepared data has sources."""

import json

import numpy as np
import pytest
import zstandard

from seqjax.data import document_sources, prepare, slimpajama
from seqjax.training import eval_losses
from seqjax.training.loop import train
from tests import support

SOURCES = ("stacks/stacks-project", "latex3/latex2e", "")


def write_source(directory):
    """Write documents that fill one block each; a document's index in the shard determines its source."""
    rng = np.random.default_rng(0)
    for split, n_documents in (("train", 12), ("validation", 6)):
        lines = []
        for domain in slimpajama.DOMAINS:
            for i in range(n_documents):
                text = "".join(rng.choice(list("abcdefgh "), support.SEQ_LEN - 1))
                meta = {"redpajama_set_name": domain.set_name}
                if name := SOURCES[i % 3]:
                    meta["source"] = f"{name}:{i}.tex"
                lines.append(json.dumps({"text": f"x{text[1:]}", "meta": meta}) + "\n")
        path = directory / split / "a.jsonl.zst"
        path.parent.mkdir(parents=True)
        path.write_bytes(zstandard.ZstdCompressor().compress("".join(lines).encode()))
    return directory


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared")
    source = write_source(root / "source")
    prepare.prepare(source, root / "out", tokenizer="byte", seq_len=support.SEQ_LEN, workers=1)
    return root / "out"


def train_and_read_blocks(out, workdir):
    assert train(support.run_config(out, "transformer_pp", train__steps=2, checkpoint__every=0), workdir) is True
    return eval_losses.read(workdir)[0]


def test_run_stores_block_sources(out, tmp_path):
    blocks = train_and_read_blocks(out, tmp_path / "run")
    assert eval_losses.domains_of(blocks) == {"commoncrawl", "c4", "arxiv", "github", "stackexchange"}
    for domain in eval_losses.domains_of(blocks):
        documents, sources = blocks[f"{domain}/documents"].tolist(), blocks[f"{domain}/sources"]
        assert sources.dtype == np.int64
        # The 6 validation documents come before the training documents; both numbers are divisible by 3.
        names = [SOURCES[d % 3] for d in documents]
        assert set(names) == set(SOURCES)
        expected = [document_sources.number(name) if name else -1 - d for name, d in zip(names, documents, strict=True)]
        assert sources.tolist() == expected


def test_blocks_without_sources_store_none(blocks_dir, tmp_path):
    blocks = train_and_read_blocks(blocks_dir, tmp_path / "run")
    assert {key.rpartition("/")[2] for key in blocks} == {"index", "documents", "n_bytes", "sha256"}
