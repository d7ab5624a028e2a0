"""Cut studies to small example and test data: `python -m lab.cut`.

    seqjax/study/example       six models of trunks_110m, for colab/read_a_study.py
    tests/golden/studies/NAME  one study per stored format, with its tables

points.csv is recomputed, because losses over fewer blocks have different means. Existing goldens are never overwritten:
later versions must read them unchanged.
"""

import csv
import io
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqjax.study.report import results
from seqjax.study.runs.files import COLUMNS, MEAN

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "lab" / "results"
EXAMPLE = ROOT / "seqjax" / "study" / "example"
GOLDEN = ROOT / "tests" / "golden" / "studies"
NOT_READ = ("versions", "backends", "test_sets")  # run metadata that no analysis reads


class Cut(NamedTuple):
    """A selection of models, seeds, rates, evaluations and blocks in a study.

    `blocks` also limits the groups in classes.npz.
    """

    study: str
    models: Collection[str]
    seeds: Collection[int] = (0, 1)
    rates: Collection[float] = (1.0, 2.0, 3.0)
    every: int = 1  # keep every n-th evaluation of a run, counted from the last
    blocks: int = 16
    dtype: str = "float32"


PUBLISHED, SAME_BLOCK = "Transformer++, QK norm", "Transformer++, QK norm, conv"
COPIES = {"without_blocks": "first_110m", "protocol_2": "books_100k"}  # copied whole: small enough
CUTS = {
    "linear": Cut(
        "limited_110m", ("Transformer++", PUBLISHED, "Mamba-2", "Top-1 Chunk, exact"), every=3, dtype="float16"
    ),
    "sweep": Cut("figure4", ("Transformer++", PUBLISHED, "temperature 0.5", "temperature 2"), every=3),
    "wsd": Cut("trunks_110m", (PUBLISHED, SAME_BLOCK, "Gated DeltaNet", "Mamba-2")),
}
OF_EXAMPLE = (PUBLISHED, SAME_BLOCK, "Top-1 Chunk, exact", "W=256, QK norm", "Gated DeltaNet", "Mamba-2")


def example() -> dict[str, str]:
    """Return the example's file contents by name.

    The example has all runs of the models in OF_EXAMPLE, without blocks.
    """
    about = _about("trunks_110m")
    runs = {label: run for label, run in about["runs"].items() if run["model"] in OF_EXAMPLE}
    trimmed = {label: {key: of for key, of in run.items() if key not in NOT_READ} for label, run in runs.items()}
    rows = [row for row in _rows("trunks_110m") if row["run"] in trimmed and not row["domain"].startswith(MEAN)]
    return {"runs.json": json.dumps(about | {"runs": trimmed, "missing": {}}) + "\n", "points.csv": _csv(rows)}


def _about(study: str) -> dict[str, Any]:
    return json.loads((RESULTS / study / "runs.json").read_text(encoding="utf-8"))


def _rows(study: str) -> list[dict[str, str]]:
    with (RESULTS / study / "points.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _csv(rows: Collection[dict[str, str]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def write(cut: Cut, out: Path) -> None:
    """Write the selected part of a study to `out`."""
    about, rows = _about(cut.study), _rows(cut.study)
    about["runs"] = {
        label: run
        for label, run in about["runs"].items()
        if run["model"] in cut.models and run["seed"] in cut.seeds and run["rate"] in cut.rates
    }
    # The study's evaluations in order, each with one row per domain; `keeps` marks the selected evaluations.
    evaluations: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        evaluations.setdefault((row["run"], row["step"]), []).append(row)
    steps: dict[str, list[str]] = {}
    for label, step in evaluations:
        steps.setdefault(label, []).append(step)
    keeps = [label in about["runs"] and step in steps[label][::-1][:: cut.every] for label, step in evaluations]
    with np.load(RESULTS / cut.study / "blocks.npz") as arrays:
        assert arrays["kept"].all()
        blocks: dict[str, Any] = {key: arrays[key][: cut.blocks] for key in arrays if key.endswith("/documents")}
        blocks["kept"] = np.ones(sum(keeps), bool)
        for domain in [key.removesuffix("/documents") for key in blocks if key != "kept"]:
            losses = arrays[f"{domain}/losses"][keeps, : cut.blocks].astype(cut.dtype)
            blocks[f"{domain}/losses"] = losses
            means = iter(losses.astype(float).mean(1))
            for keep, of_domains in zip(keeps, evaluations.values(), strict=True):
                if keep:
                    (row,) = (row for row in of_domains if row["domain"] == domain)
                    row["loss"] = f"{next(means):.6f}"
    selected = [row for keep, of_domains in zip(keeps, evaluations.values(), strict=True) if keep for row in of_domains]
    out.mkdir(parents=True)
    (out / "runs.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    (out / "points.csv").write_text(_csv(selected), encoding="utf-8")
    np.savez_compressed(out / "blocks.npz", allow_pickle=False, **blocks)
    if (RESULTS / cut.study / "classes.npz").is_file():
        _cut_classes(RESULTS / cut.study / "classes.npz", out, list(about["runs"]), groups=cut.blocks)


def _cut_classes(path: Path, out: Path, labels: Collection[str], *, groups: int) -> None:
    with np.load(path) as arrays:
        of_run = np.isin(arrays["runs"], list(labels))
        selected = {}
        for key in arrays:
            if key in ("runs", "steps"):
                selected[key] = arrays[key][of_run]
            elif key.endswith("/losses"):
                selected[key] = arrays[key][of_run, :groups]
            else:
                selected[key] = arrays[key][:groups]
        np.savez_compressed(out / "classes.npz", allow_pickle=False, **selected)


def main() -> None:
    """Write the example, and the missing goldens."""
    EXAMPLE.mkdir(exist_ok=True)
    for name, text in example().items():
        (EXAMPLE / name).write_text(text, encoding="utf-8")
    for name in (*CUTS, *COPIES):
        out = GOLDEN / name
        if out.exists():
            continue
        if name in CUTS:
            write(CUTS[name], out)
        else:
            out.mkdir(parents=True)
            for file in (name for name in results.DATA if name != "metrics.npz"):
                if (RESULTS / COPIES[name] / file).is_file():
                    shutil.copy(RESULTS / COPIES[name] / file, out)
        results.analyse(out, quiet=True)
        for path in out.iterdir():
            if path.suffix in (".png", ".svg") or path.name == "classes.md":
                path.unlink()


if __name__ == "__main__":
    main()
