"""Test that the pages written by lab/pages match the results."""

import csv
import json
import re
import runpy
from pathlib import Path

import pytest

from seqjax.config import from_config_dict, presets
from seqjax.evals.recall import report
from seqjax.study.report import figures
from tests import support
from tests.evals.recall_results import result
from tests.pictures import assert_readable, overlapping

PAGES = support.ROOT / "lab" / "pages"
RESULTS = support.ROOT / "lab" / "results"


@pytest.fixture(scope="module")
def all_mixers():
    """The script of lab/results/all_mixers.md, and its data."""
    script = runpy.run_path(str(PAGES / "all_mixers.py"))
    return script, script["read"]()


def tables(page: str) -> list[dict[str, list[str]]]:
    """Return each table as {first cell: other cells}."""
    parsed = []
    for block in re.findall(r"(?:^\|.*\n)+", page, re.M):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        parsed.append({row[0]: row[1:] for row in rows[2:]})
    return parsed


def test_all_mixers_page_is_current(all_mixers):
    """`python -m lab.pages.all_mixers` writes the page."""
    script, known = all_mixers
    assert (RESULTS / "all_mixers.md").read_text(encoding="utf-8") == script["page"](known)


@pytest.fixture(scope="module")
def results():
    """The script of docs/results.md and README.md."""
    return runpy.run_path(str(PAGES / "results.py"))


@pytest.mark.parametrize("name", ["README.md", "docs/results.md", "lab/results/mixers.md", "lab/results/kernels.md"])
def test_generated_numbers_are_current(results, name):
    """`python -m lab.pages.results` writes the numbers."""
    text = (support.ROOT / name).read_text(encoding="utf-8")
    assert results["page"](name, text) == text, "run python -m lab.pages.results"


def test_readme_is_short_and_names_the_largest_trained_model():
    text = (support.ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    rows = tables(text)[0]
    assert len(rows) == 8 and all(re.fullmatch(r"0|[+-]0\.\d\d ± 0\.\d\d", cells[1]) for cells in rows.values())
    with (RESULTS / "runs.csv").open(encoding="utf-8", newline="") as file:
        largest = max(int(row["parameters"]) for row in csv.DictReader(file))
    assert f"has {largest / 1e6:.0f}M parameters" in text


def test_missing_markers_and_outdated_claims_are_refused(results, monkeypatch):
    page, blocks = results["page"], results["BLOCKS"]["README.md"]
    monkeypatch.setitem(blocks, "results", lambda: "new")
    assert (
        page("README.md", "a\n<!--results-->\nold\n<!--/results-->\nb") == "a\n<!--results-->\nnew\n<!--/results-->\nb"
    )
    for text in ("", "<!--results-->", "<!--/results-->", 2 * "<!--results--><!--/results-->"):
        with pytest.raises(ValueError, match="<!--/results-->"):
            page("README.md", text)
    board = {key: row | {"verdict": "undecided"} for key, row in results["board"]("trunks_110m").items()}
    monkeypatch.setitem(results["row"].__globals__, "board", lambda study: board)
    with pytest.raises(ValueError, match=r"results\.py"):
        results["results"]()


def test_parts_page_is_current():
    """`python -m lab.pages.parts` writes the page."""
    script = runpy.run_path(str(PAGES / "parts.py"))
    models = script["read"]()
    assert (RESULTS / "switches" / "parts.md").read_text(encoding="utf-8") == script["page"](models)
    lost = models["Gated DeltaNet"].parts["conv"].outside
    lines = (RESULTS / "runs.csv").read_text(encoding="utf-8").splitlines()
    outside = {row["run"]: float(row["loss_out_of_domain"]) for row in csv.DictReader(lines)}
    ends = outside["Gated DeltaNet, no conv, rate 0.002"], outside["Gated DeltaNet, rate 0.002"]
    assert lost == pytest.approx(ends[0] - ends[1], abs=2e-4), "positive: the loss is lower with the part"


def test_each_mixer_has_a_row_with_measured_numbers_only(all_mixers):
    script, known = all_mixers
    models = [config.model for config in known.configs.values()]
    speeds = json.loads((support.ROOT / "benchmarks" / "results" / "train_step.json").read_text())["results"]
    for name in presets.names():
        if name in speeds:  # a config without any measurement has no row
            assert from_config_dict(presets.read_config(f"{name}:110m")).model in models, name
    gaps, costs, tasks = tables(script["page"](known))
    trained = {run.model for run in known.study.runs}
    for label in known.configs:
        assert any(gaps[label]) == (label in trained), label
        assert any(costs[label][1:2] + costs[label][3:5]) == (label in known.speeds), label
        assert any(tasks[label]) == any(label in of_task for of_task in known.tasks.values()), label
    assert set(gaps) == set(costs) == set(tasks) == set(known.configs)


def test_speeds_and_states_match_the_files(all_mixers):
    _, known = all_mixers
    speeds = json.loads((support.ROOT / "benchmarks" / "results" / "train_step.json").read_text())["results"]
    approx = speeds["top1_chunk:model.mixer.selection=approx"]["tokens_per_s"]
    assert known.speeds["Top-1 Chunk, approx"].tokens_per_s == approx
    assert known.speeds["Top-1 Chunk, approx"].ratio == approx / speeds["transformer_pp"]["tokens_per_s"]
    # Keys and values in 12 layers: all tokens, and a window.
    assert known.states["Transformer++"] == (12 * 2 * 768 * 2_048, 12 * 2 * 768 * 102_400)
    assert known.states["W=256, QK norm"] == (12 * 2 * 768 * 256, 12 * 2 * 768 * 256)


def test_selection_picture_uses_the_speeds_of_its_models(all_mixers):
    script, known = all_mixers
    selection = runpy.run_path(str(PAGES / "selection.py"))
    for label, name in selection["STEPS"].items():
        model = "Transformer++" if label == selection["REFERENCE"] else label  # timed without QK norm
        assert script["_config"](name).model == known.configs[model].model, label
    assert set(selection["losses"]()) < set(selection["speeds"]())


def test_scores_of_untrained_runs_are_in_brackets(all_mixers, monkeypatch):
    script, known = all_mixers
    hops, noisy = result("FoX", "hops", 0.5), result("FoX", "noisy", 0.25)
    hops["tests"]["1 of 8"]["accuracy"] = 0.79
    noisy["tests"]["32 in 1024"]["accuracy"] = 0.5  # one of five
    grammar = [result("KDA", "grammar", score, rate=rate) for score, rate in ((-0.25, 1e-3), (-0.5, 3e-3))]
    for one in grammar:
        one["tests"]["2 rules, forced"]["accuracy"] = 0.8
    other = result("Transformer++, QK norm", "hops", 0.125)
    monkeypatch.setattr(report, "results", lambda directory: [hops, noisy, *grammar, other])
    configs = known.configs | {"Transformer++, QK norm": known.configs["Transformer++"]}  # config without the norm
    of_twin = {"Transformer++, QK norm": known.parameters["Transformer++"]}
    scores = known._replace(configs=configs, parameters=known.parameters | of_twin, tasks=script["_scores"](configs))
    [*_, shown] = tables(script["page"](scores))
    assert shown["FoX"] == ["(30)", "(50)", ""]
    assert shown["KDA"] == ["", "", "-0.250"] and shown["Transformer++, QK norm"] == [""] * 3
    trained = known._replace(tasks={"mqar": known.tasks["mqar"]})
    assert "the score says little" in script["page"](scores) and "the score says little" not in script["page"](trained)


def test_each_mixer_with_a_recorded_speed_has_one_on_the_page(all_mixers):
    """Each record of this GPU at 2,048 tokens is either in SPEEDS, or older than a record there."""
    script, known = all_mixers
    recorded = {path.stem: json.loads(path.read_text()) for path in script["BENCHMARKS"].glob("train_step*.json")}

    def of(report):
        return report["machine"]["device"], *(report["settings"][key] for key in ("size", "seq_len", "batch", "remat"))

    same = [name for name, report in recorded.items() if of(report) == of(recorded["train_step"])]
    assert set(script["SPEEDS"]) & set(same) < set(same)
    assert set(script["_speeds"](same, known.configs)) <= set(known.speeds)


def test_all_mixers_picture_is_readable(all_mixers, monkeypatch):
    script, known = all_mixers
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    script["draw"](Path("all_mixers.png"), known)
    assert_readable(drawn[0], categories=True)
    gaps = drawn[0].axes[0]
    assert not overlapping([*gaps.get_yticklabels(), *(axis.xaxis.label for axis in drawn[0].axes)])
