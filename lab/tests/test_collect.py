"""Test `python -m lab.collect` on small studies and on the committed studies."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from lab import collect
from seqjax.study.runs.files import COLUMNS

DOMAINS = {"arxiv": 1.0, "github": 1.5}
LOSSES = {500: 3.4, 800: 3.2, 1000: 3.1}  # in-domain loss by step


def write(directory: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Write a study; `runs` maps a label to model, seed, gap, seconds, and `wsd`: whether the run has several ends."""
    entries, rows = {}, [",".join(COLUMNS)]
    for label, run in runs.items():
        config = {"optim": {"lr": 1e-3}, "train": {"ends": [0.5, 0.8, 1.0] if run["wsd"] else [], "steps": 1000}}
        entries[label] = {"model": run["model"], "seed": run["seed"], "rate": 1.0, "schedule": 1.0, "config": config}
        entries[label] |= {"parameters": 2000, "seconds": run["seconds"], "device": "cpu", "tokens_per_s": 99.6}
        entries[label] |= {"commit": "0123456789abcdef", "manifest": "m"}
        for step, loss in LOSSES.items():
            inside = loss + 0.01 * run["seed"]
            losses = {"c4": inside} | {domain: inside + more + run["gap"] for domain, more in DOMAINS.items()}
            for domain, value in losses.items():
                start = [f'"{label}"', f'"{run["model"]}"', run["seed"], "1,1", step, 100 * step, 2.5]
                rows.append(",".join(map(str, [*start, domain, f"{value:.6f}"])))
    study = {"title": "t", "references": ["A"], "domains": list(DOMAINS), "against": ["c4"]}
    directory.mkdir(parents=True)
    (directory / "runs.json").write_text(json.dumps({"study": study, "missing": {}, "runs": entries}))
    (directory / "points.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture
def collected(tmp_path: Path) -> dict[str, list[dict[str, str]]]:
    """Rows of both files for a large study, and a small study with another schedule."""
    runs = {
        f"{model}, seed {seed}": {"model": model, "seed": seed, "gap": gap, "wsd": True, "seconds": 60.0 + seed}
        for model, gap in {"A": 0.0, "B": 0.2}.items()
        for seed in range(2)
    }
    write(tmp_path / "large", runs)
    linear = {
        label: {"model": model, "seed": 0, "gap": gap, "wsd": False, "seconds": 30.0}
        for label, model, gap in (("A, linear", "A", 0.0), ("linear", "C", 0.1))
    }
    write(tmp_path / "small", linear)
    out = tmp_path / "out"
    out.mkdir()
    collect.main([f"--place={tmp_path}", f"--out={out}"])
    return {path.name: table(path.read_text(encoding="utf-8")) for path in out.iterdir()}


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_shared_run_is_listed_once_with_the_largest_study(collected) -> None:
    rows = {(row["study"], row["run"]): row for row in collected["runs.csv"]}
    large = [("large", f"{model}, seed {seed}") for model in "AB" for seed in range(2)]
    assert list(rows) == [*large, ("small", "A, linear"), ("small", "linear")]
    first, linear = rows[large[0]], rows["small", "linear"]
    assert (first["schedule"], first["ends"]) == ("WSD", "0.5 0.8 1")
    assert (linear["schedule"], linear["ends"]) == ("linear", "1")
    assert (first["loss_in_domain"], first["loss_out_of_domain"]) == ("3.1000", "4.3500")
    assert (first["tokens"], first["tokens_per_parameter"]) == ("100000", "50.000")
    assert (first["minutes"], first["tokens_per_s"], first["commit"]) == ("1.0", "100", "0123456789ab")
    assert {row["command"] for row in rows.values()} == {""}


def test_leaderboard_has_the_rows_of_all_studies(collected) -> None:
    rows = {(row["study"], row["reference"], row["model"]): row for row in collected["leaderboard.csv"]}
    assert list(rows) == [("large", "A", "B"), ("small", "A", "C")]
    gap = rows["large", "A", "B"]
    assert float(gap["gap"]) == pytest.approx(0.2, abs=1e-6) and gap["seeds"] == "2"
    assert float(rows["small", "A", "C"]["tokens_out"]) == pytest.approx(0.1, abs=1e-6)


def test_committed_files_are_current() -> None:
    """`python -m lab.collect` writes the files."""
    texts = collect.texts(collect.RESULTS)
    assert (collect.RESULTS / "runs.csv").read_text(encoding="utf-8") == texts["runs.csv"]
    committed = table((collect.RESULTS / "leaderboard.csv").read_text(encoding="utf-8"))
    current = table(texts["leaderboard.csv"])
    for key in ("study", "reference", "model"):
        assert [row[key] for row in committed] == [row[key] for row in current]
