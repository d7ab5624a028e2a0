"""A new source is one module in `seqjax.data.sources`, or a class in a program."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from seqjax.config import DataConfig
from seqjax.data import open_corpus
from seqjax.data.layout import SLIMPAJAMA
from seqjax.data.sources import Shard, ignore, kinds
from tests import support

from .conftest import command, prepared, row, write_shard

TEXTS = [f"document {i} " + "word " * (i % 7) for i in range(60)]


def test_documented_source_is_one_file(tmp_path: Path):
    """The example in docs/data.md, added to a copy of seqjax, reads its format."""
    page = (support.ROOT / "docs" / "data.md").read_text().partition("## A source of your own")[2]
    copy = tmp_path / "copy"
    shutil.copytree(support.ROOT / "seqjax", copy / "seqjax", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "seqjax" / "data" / "sources" / "csv_rows.py").write_text(page.split("```")[1])
    for split in ("train", "validation"):
        write_shard(tmp_path / "lines" / split / "a.jsonl.zst", [row("c4", text) for text in TEXTS])
        path = tmp_path / "rows" / split / "a.csv"
        path.parent.mkdir(parents=True)
        rows = [f'RedPajamaC4,"{text}"' for text in TEXTS]
        path.write_text("\n".join(["meta.redpajama_set_name,text", *rows]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), str(support.ROOT)])}
    out = tmp_path / "out"
    done = subprocess.run(
        command(tmp_path / "rows", out, "--workers=2"),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["splits"]["train"]["c4"]["documents"] == len(TEXTS)
    assert manifest["splits"] == prepared(tmp_path / "lines", tmp_path / "expected")["splits"]


def test_source_defined_in_a_program_is_streamed(tmp_path: Path):
    class Upper(Shard):
        """A file of capitalised paragraphs; the folder is the domain."""

        endings = (".upper",)

        def records(self, layout=SLIMPAJAMA, *, on_read=ignore):
            for text in b"".join(self.content(on_read)).decode().split("\n\n"):
                yield {layout.text_field: text.lower()}

    for split in ("train", "validation"):
        path = tmp_path / split / "c4" / "a.upper"
        path.parent.mkdir(parents=True)
        path.write_text("\n\n".join(f"{split} {text}" for text in TEXTS).upper())
    config = DataConfig(corpus="stream", path=str(tmp_path), train_domains=("c4",), eval_domains=("c4",))
    corpus = open_corpus(config, seq_len=16, vocab_size=258)
    evaluated = corpus.tokenizer.decode(corpus.eval_blocks("c4", count=4).tokens.ravel())
    assert evaluated.startswith("validation document 0 validation document 1")
    iterator = corpus.train_iterator(batch_size=4)
    rows = [next(iterator)["tokens"] for _ in range(3)]
    state = iterator.get_state()
    following = next(iterator)["tokens"]
    iterator.set_state(state)
    assert (next(iterator)["tokens"] == following).all()
    assert "train document" in corpus.tokenizer.decode(rows[0].ravel())
    iterator.close()


def test_every_module_defines_a_source():
    modules = {kind.__module__.rpartition(".")[2] for kind in kinds() if kind.__module__.startswith("seqjax.")}
    files = (support.ROOT / "seqjax" / "data" / "sources").glob("*.py")
    assert modules == {path.stem for path in files} - {"__init__"}
