"""leaderboard.md and classes.md: tables of gaps, rates, runs, cost and classes."""

import dataclasses

import numpy as np
import pytest
from markdown_it import MarkdownIt

from seqjax.config import DataConfig
from seqjax.data import open_corpus
from seqjax.errors import UserError
from seqjax.study import gaps
from seqjax.study.gaps import classes
from seqjax.study.report import leaderboard, tables
from seqjax.training import eval_losses, token_classes
from tests import support
from tests.study.gaps.studies import records
from tests.study.report.conftest import side


def cells(text, *, first):
    """Return a table's cells, row name -> column -> text; `first` starts its header."""
    lines = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def report(study):
    return tables.report(study, leaderboard.compared(study))


def test_gap_table_matches_rows(known):
    rows = gaps.compare(known, "reference")
    table = cells(tables.gap_table(known, rows), first="model")
    assert list(table) == ["gain", "same", "alone", "dear (+4.0% parameters)", "shrinks", "far"]
    dear, row = table["dear (+4.0% parameters)"], next(row for row in rows if row.model == "dear")
    assert (dear["parameters (M)"], dear["seeds"], dear["learning rates"]) == ("104.0", "3", "0.001, 0.002")
    assert (dear["gap"], dear["as tuned"]) == (row.gap.text(), f"{row.as_tuned:+.3f}")
    assert dear["verdict"] == row.text.replace("*", "\\*") and "costs" in dear["verdict"]
    assert dear["per doubling"] == row.per_doubling.text()
    assert dear["OOD, equal tokens"] == row.at_equal_tokens.outside.text()
    assert dear["in-domain, equal tokens"] == row.at_equal_tokens.inside.text()
    assert "copies" not in dear and dear["speed-up"] == tables.DASH
    same = next(row for row in rows if row.model == "same").speed_up
    assert table["same"]["speed-up"] == f"{same.value:.2f} ({same.low:.2f} to {same.high:.2f})"
    assert (table["far"]["gap"], table["far"]["as tuned"], table["far"]["per doubling"]) == (tables.DASH,) * 3


def test_known_copy_shares_have_a_column(known):
    rows = [dataclasses.replace(row, copy=0.472) for row in gaps.compare(known, "reference")]
    assert cells(tables.gap_table(known, rows), first="model")["gain"]["copies"] == "47%"


def test_reasons_and_domains_follow_a_comparison(known):
    text = report(known)
    (why,) = [row.why for row in gaps.compare(known, "reference") if row.gap is None]
    assert f"No gap for far: {why}." in text
    domain_gaps = cells(text.split("The gap of each domain")[1], first="model")
    rows = {row.model: row for row in gaps.compare(known, "reference")}
    assert list(domain_gaps) == [name for name in rows if name != "far"]
    assert domain_gaps["dear"]["github"] == rows["dear"].gaps["github"].text()
    assert domain_gaps["dear"]["OOD mean"] == rows["dear"].gap.text()


def test_table_without_gaps_has_equal_tokens_and_reason():
    study = records([*side("reference", 0.0, shares=(1.0,)), *side("m", 0.3, shares=(1.0,))])
    (row,) = gaps.compare(study, "reference")
    text = report(study)
    table = cells(text, first="model")["m"]
    assert not {"gap", "verdict", "as tuned"} & set(table)
    assert table["OOD, equal tokens"] == row.at_equal_tokens.outside.text()
    assert f"No gap for all models: {row.why}." in text and "one end per run" in row.why
    assert "OOD difference to reference at equal tokens" in cells(text.split("## Cost")[1], first="model")["m"]


def test_missing_runs_and_remarks_come_first(known):
    text = report(dataclasses.replace(known, missing={"x": "not begun"}, remarks=("Runs differ.",)))
    assert "**Missing:** x (not begun).\n\n**Note:** Runs differ.\n" in text.split("## ")[0]
    text = report(dataclasses.replace(known, references=("reference", "absent")))
    assert "## Gaps to absent\n\nIt has no results yet" in text


def test_rate_table_marks_best_near_and_next():
    runs = [*side("reference", 0.0), *side("m", 0.0, rates=(1.0, 2.0, 0.5, 8.0))]  # losses 3, 3.01, 3.005 and 3.07
    table = cells(report(records(runs)).split("## Learning rates")[1], first="model")
    assert list(table["m"])[1:] == ["0.0005", "0.001", "0.002", "0.008", "edge", "next rate"]
    assert table["m"]["0.001"].startswith("**3.000, ") and table["m"]["0.001"].endswith(" (3)\\***")
    assert table["m"]["0.002"].startswith("3.010, ") and table["m"]["0.002"].endswith(" (1)\\*")
    assert table["m"]["0.008"].startswith("3.070, ") and table["m"]["0.008"].endswith(" (1)")
    assert (table["m"]["edge"], table["m"]["next rate"]) == (tables.DASH, tables.DASH)
    assert (table["reference"]["edge"], table["reference"]["next rate"]) == ("lowest", "0.0005")
    assert table["reference"]["0.008"] == tables.DASH


def test_cost_table_has_logged_and_measured_speeds(known):
    table = cells(report(known).split("## Cost")[1], first="model")
    assert table["reference"]["tokens/s"] == "1,900" and table["reference"]["H200, 2,048 tokens"] == "2,000"
    assert table["dear"]["H200, 2,048 tokens"] == tables.DASH
    (gap,) = [row.gap for row in gaps.compare(known, "reference") if row.model == "dear"]
    assert table["dear"]["gap to reference"] == gap.text()


def test_entropy_table_lists_measured_runs(known):
    entropy = {"entropy": 2.0, "entropy_relative": 0.25}
    run = dataclasses.replace(known.runs[0], metadata={"entropy": {"c4": entropy}})
    text = report(dataclasses.replace(known, runs=[run, *known.runs[1:]])).split("## Entropy of attention")[1]
    assert cells(text, first="run") == {
        run.label: {"run": run.label, "c4": "2.000 (0.250)"} | dict.fromkeys(("web", "arxiv", "github"), "-")
    }


def write_classes(workdir, corpus, seed):
    """Write a run's class sums as training does, and return its losses."""
    (workdir / eval_losses.DIRECTORY).mkdir(parents=True)
    blocks = {domain: corpus.eval_blocks(domain, count=9) for domain in ("c4", "arxiv")}
    rng = np.random.default_rng(seed)
    losses = {
        d: rng.random((len(evaluated.tokens), support.SEQ_LEN)).astype(np.float32) for d, evaluated in blocks.items()
    }
    token_classes.write_classes(workdir, 2, losses, blocks, corpus)
    return losses


def test_class_section(tmp_path, blocks_dir):
    corpus = open_corpus(DataConfig(corpus="blocks", path=str(blocks_dir)), seq_len=support.SEQ_LEN, vocab_size=258)
    study = records([run for name in ("reference", "m", "bare") for run in side(name, 0.0, seeds=2, rates=(1.0,))])
    study = dataclasses.replace(study, against=("c4",), domains=("arxiv",))
    labels = [run.label for run in study.runs if run.model != "bare"]
    losses = {label: write_classes(tmp_path / str(i), corpus, i) for i, label in enumerate(labels)}
    sums, _ = classes.collect({label: tmp_path / str(i) for i, label in enumerate(labels)})
    text = tables.class_section(study, sums, "reference")
    assert "### m" in text and "### bare" not in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if " | all | " in line]
    assert [row[0] for row in rows] == ["c4", "arxiv"], "training domains first"
    for row in rows:
        model_loss, reference_loss = (
            np.mean([losses[run.label][row[0]].astype(float).mean() for run in study.of_model(name)])
            for name in ("m", "reference")
        )
        assert row[3:6] == [f"{model_loss:.3f}", f"{reference_loss:.3f}", f"{model_loss - reference_loss:+.3f}"]
        assert row[6].startswith(f"{model_loss - reference_loss:+.3f} ± ")
    assert tables.class_section(study, {}, "reference") == ""
    with pytest.raises(UserError, match="'y'"):
        tables.class_section(study, sums, "y")


def elements(text: str) -> list[str]:
    """Return the Markdown elements of a text, without its words."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inside = [child for token in tokens for child in token.children or ()]
    return [token.type for token in (*tokens, *inside) if token.type not in ("text", "text_special", "softbreak")]


@pytest.mark.parametrize(
    "name", ["a | b", "\\\\| b", "<b>a</b>", "![a](http://b)", "[a](http://b)", "**a**", "`a`", "<http://a>"]
)
def test_names_are_escaped(name):
    """A special name gives the same Markdown elements as a plain name, everywhere."""
    structures = []
    for text in ("plain", name):
        runs = [*side(f"{text}1", 0.0, seeds=1), *side(f"{text}2", 0.3, seeds=1)]
        speeds = {text: {f"{text}1": 1000.0, f"{text}2": 2000.0}}
        changes = {"title": text, "missing": {text: text}, "remarks": (text,), "speeds": speeds}
        study = dataclasses.replace(records(runs, references=(f"{text}1",)), **changes)
        structures.append(elements(report(study)))
    assert structures[0] == structures[1]
