"""Test that committed tables, reports and pictures match the data."""

import json

import pytest

from benchmarks import record
from benchmarks.harness import options, report
from lab import collect, cut
from seqjax import presets
from seqjax.study.runs import files, identity
from seqjax.study.runs.studies import load_study
from seqjax.training import dry_run
from tests import support
from tests.evals.test_recall import assert_rows_in_picture, assert_same_report
from tests.study.report.test_figures import assert_all_readable
from tests.study.report.test_results import assert_same_tables

RESULTS = support.ROOT / "lab" / "results"
NAMES = sorted(path.parent.name for path in RESULTS.glob("*/leaderboard.csv"))


@pytest.mark.usefixtures("undrawn_pictures")
@pytest.mark.parametrize("name", support.slow_unless(lambda name: name in ("first_110m", "figure4"), NAMES))
def test_tables_are_current(name, tmp_path):
    assert_same_tables(RESULTS / name, tmp_path, others=[RESULTS / other for other in collect.JOINED.get(name, ())])


@pytest.mark.parametrize("name", support.slow_unless(lambda name: name in ("figure4", "demo_order"), NAMES))
def test_pictures_are_readable(name, composed):
    assert_all_readable(files.read(RESULTS / name), composed)


RECALL = (("recall", "small"), ("suite/recall", "demo"))


@pytest.mark.parametrize(("name", "size"), RECALL)
def test_recall_report_is_current(name, size, tmp_path, monkeypatch):
    assert_same_report(RESULTS / name, size, tmp_path, monkeypatch)


@pytest.mark.parametrize(("name", "size"), RECALL)
def test_each_model_has_a_row_in_each_recall_task(name, size, tmp_path, monkeypatch):
    assert_rows_in_picture(RESULTS / name, size, tmp_path, monkeypatch)


# No run is added to these results. They have settings of earlier versions, or no study in configs/studies.
FINISHED = ("ema_110m", "figure4", "first_110m", "limited_110m")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FINISHED])
def test_runs_have_the_settings_of_their_study(name):
    """Otherwise `seqjax study --partial --out=lab/results/NAME` refuses to add a run."""
    study = {run.label: run.config for run in load_study(name.replace("size_map_", "size_map:")).runs}
    for run in files.read_runs(RESULTS / name):
        assert identity.changed(run.metadata["config"], study[run.label]) == [], run.label


def test_docs_pictures_are_copies_of_the_study_pictures():
    pictures = sorted((support.ROOT / "docs" / "pictures").glob("*_gaps.png"))
    assert len(pictures) == 2
    for path in pictures:
        name = path.stem.removesuffix("_gaps")
        assert path.read_bytes() == (RESULTS / name / "gaps.png").read_bytes(), f"cp lab/results/{name}/gaps.png {path}"


def test_installed_example_is_current():
    """`python -m lab.cut` writes the example."""
    for name, text in cut.example().items():
        assert (cut.EXAMPLE / name).read_text(encoding="utf-8") == text


# --------------------------------------------------------------------------------------------------------------- speeds
def test_each_recorded_report_names_its_machine():
    paths = sorted((support.ROOT / options.RECORDED).glob("*.json"))
    assert len(paths) >= 9
    for path in paths:
        recorded = report.load(path)
        assert {"device", "cores", "python", "versions"} <= set(recorded["machine"]), path.name
        assert recorded["results"], path.name


def test_installed_speeds_are_current():
    """`python -m benchmarks.record` writes the speeds."""
    installed = json.loads(dry_run.SPEEDS.read_text(encoding="utf-8"))["speeds"]
    assert installed == record.speeds() and len(installed) > 50
    speeds = []  # Mamba-2 at 2,048 tokens on one H200
    for path in record.RESULTS.glob("train_step*.json"):
        recorded = report.load(path)
        if (recorded["machine"]["device"], recorded["settings"]["seq_len"]) == ("NVIDIA H200", 2048):
            result = recorded["results"].get("mamba2", {"devices": 1})
            if "tokens_per_s" in result and result.get("devices", 1) == 1:
                speeds.append(result["tokens_per_s"])
    of_model = [entry for entry in installed if (entry["name"], entry["device"]) == ("mamba2", "NVIDIA H200")]
    (entry,) = (entry for entry in of_model if (entry["size"], entry["seq_len"]) == ("110m", 2048))
    assert len(speeds) > 1 and entry["tokens_per_s"] == max(speeds)


def test_study_files_have_recorded_speeds():
    """A study file only imports presets, so it has a copy of the speeds."""
    trunks, limited = (presets.load(f"studies/{name}") for name in ("trunks_110m", "limited_110m"))
    long = [f"train_step_135m_100k{kind}" for kind in ("_selection", "_recurrent", "")]
    for speeds, names in ((trunks.SPEEDS, ["train_step"]), (trunks.LONG_SPEEDS, long), (limited.SPEEDS_100K, long)):
        recorded = set()
        for name in names:
            of_file = report.load(record.RESULTS / f"{name}.json")["results"]
            recorded |= {round(result["tokens_per_s"]) for result in of_file.values() if "tokens_per_s" in result}
        assert set(speeds.values()) <= recorded
