"""Test `python -m lab.foretell` on a study with known correlations."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.foretell import __main__ as command
from lab.foretell import foretell
from lab.foretell import page as foretell_page
from lab.foretell.foretell import LATER, PRIMARY, Mixer, Scores
from seqjax.config import presets
from seqjax.errors import UserError
from seqjax.evals.recall import report
from seqjax.evals.recall.setups import MODELS
from seqjax.study.runs import files
from seqjax.study.runs.studies import load_study
from tests import support
from tests.evals.recall_results import SMALL, result, write_results
from tests.pictures import assert_readable, overlapping

LABELS = list(MODELS)[:20]


def write_study(directory: Path, z: np.ndarray, u: np.ndarray, *, labels=LABELS, mixer=None) -> Path:
    """Write a study with three seeds: in-domain loss 3 + z / 10, OOD loss larger by z / 10 + u / 10 and a constant."""
    runs, points, rng = {}, [",".join(files.COLUMNS)], np.random.default_rng(0)
    for label, inside, own in zip(labels, z / 10, u / 10, strict=True):
        for seed in range(3):
            name = f"{label}, seed {seed}"
            runs[name] = {"model": label, "seed": seed, "rate": 1.0, "schedule": 1.0, "config": {"version": 4}}
            runs[name]["config"] |= {"model": {"mixer": mixer}} if mixer else {}
            noise = rng.normal(size=2) * 0.003
            losses = {
                "c4": 3 + inside + noise[0],
                "arxiv": 3.5 + 2 * inside + own + noise[1],
                "github": 4.0 + inside + own,
            }
            points += [f'"{name}","{label}",{seed},1,1,9,900,2.5,{domain},{loss}' for domain, loss in losses.items()]
    study = {
        "title": "t",
        "references": ["Transformer++"],
        "domains": ["arxiv", "github"],
        "against": ["c4"],
    }
    directory.mkdir()
    (directory / "runs.json").write_text(json.dumps({"study": study, "missing": {}, "runs": runs}))
    (directory / "points.csv").write_text("\n".join(points) + "\n")
    return directory


def shares(values: np.ndarray) -> np.ndarray:
    """Return accuracies from 20 to 80% in the order of `values`."""
    return 0.2 + 0.6 * values.argsort().argsort() / (len(values) - 1)


@pytest.fixture
def known(tmp_path: Path) -> tuple[Path, Path]:
    """Paths of a study and of recall results with two seeds.

    `mqar` predicts the OOD loss, `fuzzy` only the in-domain loss, `grammar` is random, and `hops` is solved by all.
    """
    rng = np.random.default_rng(3)
    z, u, chance = rng.normal(size=(3, len(LABELS)))
    lines = []
    for seed in range(2):
        for task, values in (("mqar", -u - 0.2 * z), ("fuzzy", -z), ("grammar", chance)):
            scores = shares(values) + 0.01 * seed
            lines += [result(label, task, s, seed=seed) for label, s in zip(LABELS, scores.tolist(), strict=True)]
        lines += [result(label, "hops", 0.99, seed=seed) for label in LABELS]
    return write_study(tmp_path / "study", z, u), write_results(tmp_path / "recall", lines)


def test_report_names_the_predictive_task(known, monkeypatch, capsys) -> None:
    study, out = known
    drawn: list[Any] = []
    monkeypatch.setattr(foretell_page.figures, "save", lambda figure, path: drawn.append((figure, path)))
    monkeypatch.setattr(foretell, "DRAWS", 200)
    command.main(["--size=small", f"--study={study}", f"--out={out}"])
    assert str(out / "foretell" / "report.md") in capsys.readouterr().out
    page = (out / "foretell" / "report.md").read_text()
    assert "**`mqar` predicts the OOD loss best** (rho -0." in page
    assert "`hops`: uninformative: 20 of 20 at the floor or the ceiling; `capacity`: not run." in page
    rows = list(csv.DictReader((out / "foretell" / "foretell.csv").read_text().splitlines()))
    assert {row["runs"] for row in rows} == {"all", "later", "trained"} and {
        row["task"] for row in rows if row["runs"] == "all"
    } == {p.task for p in PRIMARY}
    statistics = {(row["task"], row["statistic"]): row for row in rows if row["runs"] == "all"}
    of_mqar, of_fuzzy = statistics["mqar", "rho"], statistics["fuzzy", "rho"]
    assert (of_mqar["mixers"], of_mqar["answer"], of_fuzzy["answer"]) == ("20", "predicts", "undecided")
    assert float(of_mqar["low"]) < float(of_mqar["value"]) < float(of_mqar["high"]) < -0.4
    assert float(of_fuzzy["low"]) < 0 < float(of_fuzzy["high"]), "it only predicts the in-domain loss"
    assert float(statistics["fuzzy", "plain"]["value"]) < -0.5, "without the control it predicts the OOD loss"
    assert float(statistics["mqar", "p"]["value"]) < 0.01 < float(statistics["grammar", "p"]["value"])
    for name in ("one mixer left out", "one family left out"):
        low, high = (float(statistics["mqar", name][end]) for end in ("low", "high"))
        assert low <= float(of_mqar["value"]) <= high < -0.4
    assert float(statistics["mqar", "github"]["value"]) < -0.5
    assert statistics["mqar", "also controlling for state size"]["value"] == of_mqar["value"], "equal states"
    assert float(statistics["mqar", "reliability of the score"]["value"]) > 0.95
    ((figure, _),) = drawn
    assert_readable(figure, largest=(2300, 2000))  # linked, not shown on a page
    assert [panel.get_title(loc="left").partition(":")[0] for panel in figure.axes[:4]] == [p.task for p in PRIMARY[:4]]
    assert sum(panel.axison for panel in figure.axes) == 5 and "not run: capacity" in figure.get_suptitle()
    assert {text.get_text() for text in figure.axes[0].texts} == set(LABELS) and overlapping(figure.axes[0].texts) == []


@pytest.mark.slow
def test_permuted_scores_predict_nothing(known, monkeypatch) -> None:
    """One permutation in twenty is significant by chance; more than two of ten have a probability of 1%."""
    monkeypatch.setattr(foretell, "DRAWS", 20)
    study, out = known
    mixers = foretell.with_scores(foretell.read_study(files.read(study), None), report.results(out), SMALL)
    predictive = [row.answer == "predicts" for row in foretell.foretell(mixers, ["arxiv", "github"], {})]
    assert predictive == [True, False, False, False, False]
    rng, headlines = np.random.default_rng(1), []
    for _ in range(10):
        scores = [mixers[i].scores for i in rng.permutation(len(mixers))]
        permuted = [dataclasses.replace(one, scores=other) for one, other in zip(mixers, scores, strict=True)]
        headlines.append(foretell_page._headline(foretell.foretell(permuted, ["arxiv", "github"], {})))
    undecided = [text for text in headlines if text.startswith("**No task is shown to predict")]
    assert len(undecided) >= 8
    assert all("|rho| would be significant from 0.46" in text for text in undecided)


@pytest.mark.slow
def test_few_mixers_give_no_correlation(known) -> None:
    study, out = known
    command.main(["--size=small", f"--study={study}", f"--out={out}", f"--models={';'.join(LABELS[:9])}"])
    page = (out / "foretell" / "report.md").read_text()
    assert "**Too few mixers: the study and these results share 9.**" in page
    assert "rho -0" not in page and "rho +0" not in page
    rows = list(csv.DictReader((out / "foretell" / "foretell.csv").read_text().splitlines()))
    assert all(row["statistic"] == row["value"] == "" for row in rows)


def test_unknown_mixers_and_different_settings_are_refused(known, tmp_path) -> None:
    _, out = known
    labels = ["Transformer++", "ema", "Mamba-2"]
    study = write_study(tmp_path / "ema", np.arange(3.0), np.ones(3), labels=labels)
    with pytest.raises(UserError, match=r"ema\. .*--models=Transformer\+\+;Mamba-2"):
        foretell_page.write(out, [study], SMALL)
    mixers = foretell.read_study(files.read(study), ["Transformer++", "Mamba-2", "Based"])
    assert [mixer.label for mixer in mixers] == ["Transformer++", "Mamba-2"]
    mixer = {"name": "transformer_pp", "heads": 12, "qk_norm": True, "window": None}
    study = write_study(tmp_path / "normed", np.ones(1), np.ones(1), labels=["Transformer++"], mixer=mixer)
    with pytest.raises(UserError, match=r"Transformer\+\+.*qk_norm is True, not False"):
        foretell_page.write(out, [study], SMALL)
    windows = {"name": "transformer_pp", "qk_norm": True, "window": 128}
    assert foretell.other_settings({"model": {"mixer": windows}}, "W=256, QK norm") == "window is 128, not 256"
    assert (
        foretell.other_settings({"model": {"mixer": {"name": "nsa", "window": 256}}}, "NSA") == ""
    )  # depends on the size
    with pytest.raises(UserError, match=r"runs\.jsonl.*width"):
        foretell_page.write(write_results(tmp_path / "none", []), [known[0]], SMALL)


def test_second_study_adds_mixers(known, tmp_path, monkeypatch) -> None:
    """A mixer in both studies is taken from the first."""
    study, out = known
    monkeypatch.setattr(foretell_page, "draw", lambda *_, **__: None)
    labels = [*LABELS[:2], "Mamba-3"]
    other = write_study(tmp_path / "other", np.full(3, 5.0), np.ones(3), labels=labels)
    write_results(out, [*report.results(out), result("Mamba-3", "mqar", 0.5)])
    command.main(["--size=small", f"--study={study}", f"--study={other}", f"--out={out}"])
    page = (out / "foretell" / "report.md").read_text()
    assert "21 mixers of **t and t**" in page
    losses = {line.split(" | ")[0].strip("| "): line.split(" | ")[2] for line in page.splitlines() if " | " in line}
    assert float(losses["Mamba-3"]) == pytest.approx(3.5, abs=0.02), "3 + 5 / 10 plus noise"
    first = foretell.read_study(files.read(study), None)[0]
    assert losses[first.label] == f"{first.inside.mean():.3f}" != losses["Mamba-3"]
    metadata = json.loads((other / "runs.json").read_text())
    metadata["study"]["domains"] = ["arxiv"]
    (other / "runs.json").write_text(json.dumps(metadata))
    with pytest.raises(UserError, match=r"other .*domains .*study"):
        foretell_page.write(out, [study, other], SMALL)


def scores_of(lines: list[dict[str, Any]], task: str, **options: Any) -> Scores | None:
    mixer = Mixer("Based", np.ones(1), np.ones((1, 1)))
    return foretell.with_scores([mixer], lines, SMALL, **options)[0].scores.get(task)


def test_rate_is_chosen_on_validation_sequences() -> None:
    better: Any = {"validation": {"accuracy": 0.9}}
    lines = [result("Based", "mqar", 0.5, **better), result("Based", "mqar", 0.6, seed=1, **better)]
    lines += [result("Based", "mqar", 0.8, rate=3e-3), result("Based", "mqar", 0.99, dim=64)]
    scores = scores_of(lines, "mqar")
    assert scores is not None and scores.values[:, 0] == pytest.approx([0.5, 0.6])
    assert (scores.n_rates, scores.validated) == (2, True)
    for line in lines:
        del line["validation"]
    scores = scores_of(lines, "mqar")
    assert scores is not None and scores.values[:, 0] == pytest.approx([0.8]) and not scores.validated
    lines[2]["tests"]["4 in 64"]["accuracy"] = 0.1
    scores = scores_of(lines, "mqar")
    assert scores is not None and scores.mean == pytest.approx((6 * 0.8 + 0.1) / 7), "the mean of seven tests"


def test_later_score_uses_its_seeds_at_the_rate_of_all_seeds() -> None:
    worse: Any = {"validation": {"accuracy": 0.1}}
    lines = [result("Based", "fuzzy", accuracy, seed=seed) for seed, accuracy in enumerate((0.9, 0.5, 0.7))]
    lines += [result("Based", "fuzzy", 0.95, seed=seed, rate=3e-3, **worse) for seed in range(3)]
    mixer = Mixer("Based", np.ones(1), np.ones((1, 1)))
    scores = foretell.with_scores([mixer], lines, SMALL)[0].scores
    assert scores["fuzzy"].values[:, 0] == pytest.approx([0.9, 0.5, 0.7])
    assert scores[LATER.name].values[:, 0] == pytest.approx([0.5, 0.7]) and scores[LATER.name].n_rates == 2
    assert LATER.name not in foretell.with_scores([mixer], lines[:1], SMALL)[0].scores, "seed 0 was known"
    assert set(LATER.tests) <= set(SMALL.task(LATER.task).tests) and 0 not in LATER.seeds


def test_later_score_has_a_separate_p_value(known) -> None:
    """In the fixture, seed 1 of `fuzzy` ranks mixers like seed 0, so rho is equal."""
    study, out = known
    foretell_page.write(out, [study], SMALL)
    rows = list(csv.DictReader((out / "foretell" / "foretell.csv").read_text().splitlines()))
    later = {row["statistic"]: row for row in rows if row["runs"] == "later"}
    every = {row["statistic"]: row for row in rows if (row["runs"], row["task"]) == ("all", "fuzzy")}
    assert {row["task"] for row in later.values()} == {LATER.name}
    assert later["rho"]["value"] == every["rho"]["value"]
    assert float(later["p"]["value"]) < float(every["p"]["value"]), "one test, not the largest of five"
    page = (out / "foretell" / "report.md").read_text()
    assert f"## A score fixed later\n\n**`{LATER.name}`: undecided**" in page
    assert "The seeds are new" in page, "too few new mixers"


def test_later_score_is_tested_on_new_mixers(known, monkeypatch) -> None:
    study, out = known
    scores = shares(np.random.default_rng(5).normal(size=len(LABELS))).tolist()
    by_label = list(zip(LABELS, scores, strict=True))
    write_results(out, [result(label, "fuzzy", score, seed=seed) for seed in range(2) for label, score in by_label])
    monkeypatch.setattr(foretell_page, "SEEN_MIXERS", tuple(LABELS[:8]))
    foretell_page.write(out, [study], SMALL)
    rows = list(csv.DictReader((out / "foretell" / "foretell.csv").read_text().splitlines()))
    (rho,) = [row for row in rows if (row["runs"], row["statistic"]) == ("new", "rho")]
    foretell_page.write(out, [study], SMALL, chosen=LABELS[8:])
    rows = list(csv.DictReader((out / "foretell" / "foretell.csv").read_text().splitlines()))
    (only_new,) = [row for row in rows if (row["runs"], row["statistic"]) == ("later", "rho")]
    assert rho == only_new | {"runs": "new"} and rho["mixers"] == "12"
    foretell_page.write(out, [study], SMALL)
    page = (out / "foretell" / "report.md").read_text()
    assert f"**The other 12 mixers: undecided** (rho {float(rho['value']):+.2f} [" in page


def test_passed_leaves_out_untrained_runs() -> None:
    task = SMALL.task("hops")
    lines = [result("Based", "hops", 0.9), result("Based", "hops", 0.9, seed=1)]
    lines[1]["tests"][task.easy]["accuracy"] = report.PASSED - 0.01
    for passed, n in ((False, 2), (True, 1)):
        scores = scores_of(lines, "hops", passed=passed)
        assert scores is not None and len(scores.values) == n
    assert scores_of(lines[1:], "hops", passed=True) is None
    assert scores_of([result("Based", "grammar", np.nan)], "grammar") is None, "its score is nan"


def test_result_without_the_score_is_refused() -> None:
    line = result("Based", "capacity", 0.5)
    del line["tests"]["40,000"]["score"]
    with pytest.raises(UserError, match=r"capacity, Based: tests\.40,000\.score is missing"):
        scores_of([line], "capacity")


def test_scores_near_floor_or_ceiling_are_uninformative() -> None:
    def rows(means: list[float]) -> list[foretell.Row]:
        scores = [Scores(np.array([[mean, 0.0]]), edges=(0.1, 1.0)) for mean in means]
        ones = np.linspace(3, 4, 20)
        mixers = [
            Mixer(label, ones[i : i + 1], ones[i : i + 1, None] + 1, {"mqar": of_mixer})
            for i, (label, of_mixer) in enumerate(zip(LABELS, scores, strict=True))
        ]
        return foretell.foretell(mixers, ["arxiv"], {})

    inner = np.linspace(0.2, 0.9, 14).tolist()
    near = [0.11, 0.09, 0.99, 1.0, 0.1, 0.985]
    assert rows([*inner, *near])[0].informative, "six of twenty"
    row = rows([*inner[1:], *near, 0.081])[0]
    assert not row.informative and row.answer == "uninformative: 7 of 20 at the floor or the ceiling"


def test_tasks_and_families_exist() -> None:
    for primary in PRIMARY:
        task = SMALL.task(primary.task)
        assert not primary.tests or primary.tests == (task.own,)
        assert bool(task.kind.score) == (primary.number == "score")
    configs = set().union(*foretell.FAMILIES.values())
    assert {text.partition(":")[0] for text in MODELS.values()} <= configs <= set(presets.names())
    assert Mixer("Gated DeltaNet, attention 1 in 4", np.ones(1), np.ones((1, 1))).family == "delta rule"


def test_recall_has_all_mixers_of_the_studies() -> None:
    for name in ("trunks_110m", "hybrids"):
        assert {run.model for run in load_study(name).runs} <= set(MODELS), name
    study = files.read(support.ROOT / "lab" / "results" / "trunks_110m")
    labels = [mixer.label for mixer in foretell.read_study(study, None)]
    assert sorted(labels) == sorted({run.model for run in study.runs})


def test_committed_report_is_current(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(foretell_page, "draw", lambda *_, **__: None)
    results = support.ROOT / "lab" / "results"
    write_results(tmp_path, report.results(results / "recall"))
    written = foretell_page.write(tmp_path, [results / "trunks_110m", results / "hybrids"], SMALL)
    for name in (written.name, foretell_page.TABLE):
        assert (written.parent / name).read_text() == (results / "recall" / "foretell" / name).read_text()
