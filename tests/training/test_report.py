"""The report from rows that were made up, so that every number in it is known."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from seqjax.commands import train as train_command
from seqjax.config import from_config_dict, presets
from seqjax.data.corpus import Corpus
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError
from seqjax.training import report
from tests import support
from tests.pictures import assert_readable, overlapping

RUN = {"parameters": 1234567, "devices": 2, "device": "Toy", "versions": {"jax": "9.9"}, "commit": "", "backends": {}}


class Toys(Corpus):
    """Two domains and no data."""

    def __init__(self):
        super().__init__(
            name="toys",
            tokenizer=ByteTokenizer(),
            seq_len=32,
            train_domains=("c4",),
            eval_domains=("c4", "arxiv"),
            weights={"c4": 1.0},
            natural_shares={"c4": 3.0, "arxiv": 1.0},
            manifest_hash="f00d",
        )
        self.bigram = 2.5

    def bigram_loss(self, *, max_tokens=0):
        return self.bigram

    def train_iterator(self, **_):
        raise NotImplementedError

    def eval_blocks(self, domain, *, count, seed=0):
        raise NotImplementedError

    def train_sample(self, domain, *, count):
        raise NotImplementedError


@pytest.fixture
def corpus():
    return Toys()


def rows(workdir, *, losses=(3.0, 2.0), mfu=None):
    lines = []
    for step, loss in enumerate(losses, 1):
        timing = {"tokens_per_s": 1000.0 * step, "mfu": mfu, "seconds": 60.0 * step}
        lines.append({"step": step, "tokens": 500_000 * step, "train/loss": loss, **timing})
    evals = {"train/loss": 2.25, "eval/c4/loss": 2.125, "eval/c4/bits_per_byte": 1.25, "eval/arxiv/loss": 3.0625}
    lines.append({"step": len(losses), "tokens": 500_000 * len(losses), **evals})
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_mixer_of_a_hybrid_is_named(tmp_path, corpus):
    config = from_config_dict(presets.read_config("based:debug"))
    rows(tmp_path)
    assert "mixer based_conv, based_linear, transformer_pp\n" in report.write(tmp_path, config, corpus, metadata=RUN)


@pytest.mark.parametrize("sample", [None, "ab ```` c\nd"])
def test_numbers(tmp_path, corpus, blocks_dir, sample):
    rows(tmp_path, mfu=0.5)
    shown = report.write(tmp_path, support.run_config(blocks_dir), corpus, metadata=RUN, sample=sample)
    text = (tmp_path / "report.md").read_text()
    for part in ("1,234,567 parameters", "1,000,000 tokens in 2m00s on 2 x Toy", "MFU 50.0%", "f00d"):
        assert part in text
        assert part in shown
    assert "| c4 | 2.1250 | 8.37 | 1.2500 | in domain |" in text
    assert "| arxiv | 3.0625 | 21.38 |  | out of domain |" in text
    assert "| training | 2.2500 |" in text
    assert "| byte bigram | 2.5000 |" in text
    assert ("A sample" in text) == (sample is not None)
    assert "commit unknown" in text
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_no_bigram_and_one_point(tmp_path, corpus, blocks_dir):
    rows(tmp_path, losses=(3.0,))
    corpus.bigram = None
    corpus.note = "These are toys."
    config = dataclasses.replace(support.run_config(blocks_dir, "transformer_pp"), name="transformer_pp")
    shown = report.write(tmp_path, config, corpus, metadata=RUN)
    assert "byte bigram" not in shown
    assert "MFU" not in shown
    assert "These are toys." in shown
    assert "seqjax train --config=top1_chunk:debug,limited" in shown, "the other architecture is what to try next"


@pytest.mark.parametrize("losses", [(3.0,), (3.0, 2.0)])
def test_the_picture_of_a_short_run_can_be_read(tmp_path, corpus, blocks_dir, monkeypatch, losses):
    """Two ticks on every axis and a name at the end of every line, however few the evaluations."""
    drawn: list[Figure] = []
    monkeypatch.setattr(report.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    rows(tmp_path, losses=losses)
    report.write(tmp_path, support.run_config(blocks_dir), corpus, metadata=RUN)
    (figure,) = drawn
    assert_readable(figure)
    (panel,) = figure.axes
    assert [text.get_text() for text in panel.texts] == ["c4 2.12", "arxiv 3.06"]
    assert overlapping(panel.texts) == []
    assert panel.get_xlabel() == f"training tokens ({'millions' if len(losses) > 1 else 'thousands'})"
    assert panel.get_ylabel() == "loss (nats per token; lower is better)"


def test_the_next_command_keeps_the_data(tmp_path, corpus, blocks_dir):
    rows(tmp_path)
    config = support.run_config(
        blocks_dir, "transformer_pp", data__train_domains=("c4", "arxiv"), data__weights=(3.0, 1.0)
    )
    shown = report.write(tmp_path, config, corpus, metadata=RUN).splitlines()[-1]
    argv = shlex.split(shown)[2:]
    (_,), overrides = train_command.split_overrides(argv)
    other = from_config_dict(presets.read_config(argv[0].removeprefix("--config="), overrides))
    assert other.data == config.data and other.train.seq_len == config.train.seq_len
    assert other.name != config.name


def test_a_loss_beyond_words_does_not_break_the_table(tmp_path, corpus, blocks_dir):
    rows(tmp_path, losses=(3e4, 2e4))
    assert "Report:" in report.write(tmp_path, support.run_config(blocks_dir), corpus, metadata=RUN)


# As the name of a config, a size, a domain, a device, a data path and a generated text.
ATTACKS = {
    "formula": "$^$",
    "script": "<script>alert(1)</script>",
    "table": "a | b |\n| c | d |",
    "fence": "````\n# a\n```",
    "terminal": "\x1b[2J\x9b1m\r\x00",
    "link": "![a](http://host/) [b](javascript:c) <http://host>",
    "password": "https://user:pw@host/a?token=pw",
    "shell": "a; touch /tmp/x; $(touch y) `touch z`",
}


def markup(page: str) -> list[str]:
    """The elements of a page: its headings, lists, tables and blocks of code, and pictures, links and HTML in them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    found = [token.type for token in tokens if token.type != "inline"]
    found += [
        child.type for token in tokens for child in token.children or () if child.type not in ("text", "softbreak")
    ]
    return [kind for kind in found if kind != "text_special"]  # an escaped character


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS.keys())
def test_texts_of_strangers_are_words_in_a_report(tmp_path, corpus, blocks_dir, text):
    """Of any of them the page has the same elements, and no control characters."""
    config = support.run_config(blocks_dir)
    pages, shown = {}, ""
    for name in ("plain", text):
        rows(tmp_path)
        path = tmp_path / "metrics.jsonl"
        path.write_text(path.read_text().replace("eval/arxiv/", f"eval/{json.dumps(name)[1:-1]}/"))
        corpus.eval_domains, corpus.name, corpus.natural_shares = ("c4", name), name, {"c4": 3.0, name: 1.0}
        data = dataclasses.replace(config.data, path=name)
        named = dataclasses.replace(config, name=name, size=name, data=data)
        metadata = RUN | {"device": name, "commit": name, "versions": {name: name}, "backends": {"op": name}}
        shown = report.write(tmp_path, named, corpus, metadata=metadata, sample=f"a {name} b", called=name)
        pages[name] = (tmp_path / "report.md").read_text()
    assert markup(pages[text]) == markup(pages["plain"])
    assert "pw" not in pages[text]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", pages[text])
    assert f"--workdir={text}" in shlex.split(shown.partition("Try next:")[2])


def test_a_report_does_not_follow_links(tmp_path, corpus, blocks_dir):
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    rows(tmp_path / "run")
    for name in ("report.md", "report.png"):
        (tmp_path / "outside" / name).write_text("mine")
        (tmp_path / "run" / name).symlink_to(tmp_path / "outside" / name)
    report.write(tmp_path / "run", support.run_config(blocks_dir), corpus, metadata=RUN)
    for name in ("report.md", "report.png"):
        assert (tmp_path / "outside" / name).read_text() == "mine"
        assert (tmp_path / "run" / name).is_file() and not (tmp_path / "run" / name).is_symlink()


@pytest.mark.parametrize(
    ("names", "following"),
    [
        (["mamba2", "seqjax.mixers.transformer"], 'seqjax generate --workdir=runs/x --prompt="def "'),
        (["my.ema", "mamba2"], 'seqjax generate --workdir=runs/x --prompt="def " --allow-code=my.ema'),
        (["in_a_cell"], "seqjax.load('runs/x').generate('def ')    # in Python, with the mixer registered"),
    ],
)
def test_the_next_command_can_open_the_run(names, following):
    assert report._generate_command(Path("runs/x"), names) == following


@pytest.mark.parametrize("field", ["train/loss", "eval/c4/loss", "tokens"])
def test_rows_without_a_loss_are_named(field, tmp_path, corpus, blocks_dir):
    rows(tmp_path)
    path = tmp_path / "metrics.jsonl"
    kept = [{key: x for key, x in json.loads(line).items() if key != field} for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    with pytest.raises(UserError, match=rf"metrics\.jsonl of .*, step \d+.*{field}"):
        report.write(tmp_path, support.run_config(blocks_dir), corpus, metadata=RUN)
