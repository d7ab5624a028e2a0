"""A run on prepared text stores the source of each evaluated block; a run on older blocks stores none."""

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
    """Each document fills one block. The source of a document is known by its number in the shard."""
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


def described(out, workdir):
    assert train(support.run_config(out, "transformer_pp", train__steps=2, checkpoint__every=0), workdir) is True
    return eval_losses.read(workdir)[0]


def test_a_run_stores_the_source_of_each_block(out, tmp_path):
    blocks = described(out, tmp_path / "run")
    assert eval_losses.domains_of(blocks) == {"commoncrawl", "c4", "arxiv", "github", "stackexchange"}
    for domain in eval_losses.domains_of(blocks):
        documents, found = blocks[f"{domain}/documents"].tolist(), blocks[f"{domain}/sources"]
        assert found.dtype == np.int64
        # 6 documents of validation come first, and then those of train; both are divisible by 3.
        names = [SOURCES[d % 3] for d in documents]
        assert set(names) == set(SOURCES)
        wanted = [document_sources.number(name) if name else -1 - d for name, d in zip(names, documents, strict=True)]
        assert found.tolist() == wanted


def test_a_run_on_blocks_without_sources_stores_none(blocks_dir, tmp_path):
    blocks = described(blocks_dir, tmp_path / "run")
    assert {key.rpartition("/")[2] for key in blocks} == {"index", "documents", "n_bytes", "sha256"}
