"""The report of a finished run, from rows with known numbers."""

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


class ToyCorpus(Corpus):
    """A corpus with two domains and no data."""

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
    return ToyCorpus()


def rows(workdir, *, losses=(3.0, 2.0), mfu=None):
    lines = []
    for step, loss in enumerate(losses, 1):
        timing = {"tokens_per_s": 1000.0 * step, "mfu": mfu, "seconds": 60.0 * step}
        lines.append({"step": step, "tokens": 500_000 * step, "train/loss": loss, **timing})
    evals = {"train/loss": 2.25, "eval/c4/loss": 2.125, "eval/c4/bits_per_byte": 1.25, "eval/arxiv/loss": 3.0625}
    lines.append({"step": len(losses), "tokens": 500_000 * len(losses), **evals})
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_report_names_all_mixers_of_a_hybrid(tmp_path, corpus):
    config = from_config_dict(presets.read_config("based:debug"))
    rows(tmp_path)
    assert "mixer based_conv, based_linear, transformer_pp\n" in report.write(tmp_path, config, corpus, metadata=RUN)


@pytest.mark.parametrize("sample", [None, "ab ```` c\nd"])
def test_report_contains_the_metrics(tmp_path, corpus, blocks_dir, sample):
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


def test_report_without_bigram_and_with_one_evaluation(tmp_path, corpus, blocks_dir):
    rows(tmp_path, losses=(3.0,))
    corpus.bigram = None
    corpus.note = "These are toys."
    config = dataclasses.replace(support.run_config(blocks_dir, "transformer_pp"), name="transformer_pp")
    shown = report.write(tmp_path, config, corpus, metadata=RUN)
    assert "byte bigram" not in shown
    assert "MFU" not in shown
    assert "These are toys." in shown
    assert "seqjax train --config=top1_chunk:debug,limited" in shown, "the next command trains the other config"


@pytest.mark.parametrize("losses", [(3.0,), (3.0, 2.0)])
def test_picture_of_a_short_run_is_readable(tmp_path, corpus, blocks_dir, monkeypatch, losses):
    """Every axis has two ticks and every line a name, even with one evaluation."""
    figures: list[Figure] = []
    monkeypatch.setattr(report.Figure, "savefig", lambda self, *_, **__: figures.append(self))
    rows(tmp_path, losses=losses)
    report.write(tmp_path, support.run_config(blocks_dir), corpus, metadata=RUN)
    (figure,) = figures
    assert_readable(figure)
    (panel,) = figure.axes
    assert [text.get_text() for text in panel.texts] == ["c4 2.12", "arxiv 3.06"]
    assert overlapping(panel.texts) == []
    assert panel.get_xlabel() == f"training tokens ({'millions' if len(losses) > 1 else 'thousands'})"
    assert panel.get_ylabel() == "loss (nats per token; lower is better)"


def test_next_command_uses_the_same_data(tmp_path, corpus, blocks_dir):
    rows(tmp_path)
    config = support.run_config(
        blocks_dir, "transformer_pp", data__train_domains=("c4", "arxiv"), data__weights=(3.0, 1.0)
    )
    shown = report.write(tmp_path, config, corpus, metadata=RUN).splitlines()[-1]
    argv = shlex.split(shown)[2:]
    (_,), overrides = train_command.split_overrides(argv)
    next_config = from_config_dict(presets.read_config(argv[0].removeprefix("--config="), overrides))
    assert next_config.data == config.data and next_config.train.seq_len == config.train.seq_len
    assert next_config.name != config.name


def test_huge_losses_fit_the_table(tmp_path, corpus, blocks_dir):
    rows(tmp_path, losses=(3e4, 2e4))
    assert "Report:" in report.write(tmp_path, support.run_config(blocks_dir), corpus, metadata=RUN)


# Untrusted text for the config name, size, domain, device, data path and sample.
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


def page_elements(page: str) -> list[str]:
    """Return the types of all Markdown elements of a page."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    elements = [token.type for token in tokens if token.type != "inline"]
    elements += [
        child.type for token in tokens for child in token.children or () if child.type not in ("text", "softbreak")
    ]
    return [kind for kind in elements if kind != "text_special"]  # an escaped character


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS.keys())
def test_report_escapes_untrusted_text(tmp_path, corpus, blocks_dir, text):
    """The page has the same elements as with plain text, and no control characters."""
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
        shown = report.write(tmp_path, named, corpus, metadata=metadata, sample=f"a {name} b", label=name)
        pages[name] = (tmp_path / "report.md").read_text()
    assert page_elements(pages[text]) == page_elements(pages["plain"])
    assert "pw" not in pages[text]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", pages[text])
    assert f"--workdir={text}" in shlex.split(shown.partition("Try next:")[2])


def test_report_replaces_links_instead_of_following_them(tmp_path, corpus, blocks_dir):
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
def test_generate_command_can_open_the_run(names, following):
    assert report._generate_command(Path("runs/x"), names) == following


@pytest.mark.parametrize("field", ["train/loss", "eval/c4/loss", "tokens"])
def test_incomplete_rows_are_rejected(field, tmp_path, corpus, blocks_dir):
    rows(tmp_path)
    path = tmp_path / "metrics.jsonl"
    incomplete = [
        {key: x for key, x in json.loads(line).items() if key != field} for line in path.read_text().splitlines()
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in incomplete))
    with pytest.raises(UserError, match=rf"metrics\.jsonl of .*, step \d+.*{field}"):
        report.write(tmp_path, support.run_config(blocks_dir), corpus, metadata=RUN)
