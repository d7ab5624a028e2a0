"""A study's files: round trip, edited files, block sources, merged studies."""

import shutil

import numpy as np
import pytest

from seqjax.errors import UserError
from seqjax.study.runs import files
from tests.study.gaps.studies import records, run

DOMAINS = ("arxiv", "github", "c4", "web")


@pytest.fixture
def directory(tmp_path):
    """Write a study: two runs with ends at 50 and 100%, and blocks that fit points.csv."""
    runs = [run(m, shares=(0.5, 1.0), metadata={"config": {"train": {"ends": [0.5, 1.0]}}}) for m in ("reference", "m")]
    study = records(runs, blocks=6)
    about = {"title": "t", "references": ["reference"], "domains": ["arxiv", "github"], "against": ["c4", "web"]}
    arrays = {f"{domain}/documents": np.arange(6) // 2 for domain in DOMAINS}
    arrays |= {f"{domain}/losses": study.blocks.losses[domain].astype(np.float32) for domain in DOMAINS}
    arrays["kept"] = np.ones(4, bool)
    files._write_tables(tmp_path, study.runs, study=about, missing={}, arrays=arrays)
    return tmp_path


def test_round_trip(directory):
    study_records = files.read(directory)
    assert [r.label for r in study_records.runs] == ["reference, rate 1, seed 0", "m, rate 1, seed 0"]
    assert [p.step for p in study_records.runs[0].ends] == [500, 1000] and study_records.runs[0].is_wsd
    assert study_records.name == directory.name and study_records.remarks == ()
    for record in study_records.runs:
        for point in record.ends:
            for domain in DOMAINS:
                assert study_records.blocks.losses[domain][point.row].mean() == pytest.approx(
                    point.domains[domain], abs=1e-4
                )


def test_known_sources_are_the_sampling_units(directory):
    with np.load(directory / "blocks.npz") as stored:
        arrays = dict(stored)
    arrays["c4/sources"] = np.zeros(6, int)  # a single source has no variance, so documents are drawn
    arrays["arxiv/sources"] = np.arange(6) // 3
    np.savez(directory / "blocks.npz", **arrays)
    units = files.read(directory).blocks.units
    np.testing.assert_array_equal(units["arxiv"], [0, 0, 0, 1, 1, 1])
    for domain in ("github", "c4", "web"):
        np.testing.assert_array_equal(units[domain], [0, 0, 1, 1, 2, 2])


def test_later_sources_are_no_difference():
    known = {"c4/documents": np.arange(3), "c4/sources": np.array([7, 7, 9])}
    assert not files._differ(known, {"c4/documents": np.arange(3)})
    assert not files._differ(known, known | {"c4/sources": np.array([-1, -2, -3])})
    assert files._differ(known, {"c4/documents": np.arange(1, 4)})


def test_edited_loss_is_refused(directory):
    table = directory / "points.csv"
    lines = table.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith('"m, rate 1') and ",github," in line)
    start, _, loss = lines[at].rpartition(",")
    lines[at] = f"{start},{float(loss) - 0.02:.6f}"
    table.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"github.*'m, rate 1, seed 0'.*edited"):
        files.read(directory)


def test_exchanged_blocks_are_refused(directory, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(directory, other, dirs_exist_ok=True)
    with np.load(other / "blocks.npz") as stored:
        arrays = dict(stored)
    np.savez(directory / "blocks.npz", **arrays | {"arxiv/losses": arrays["arxiv/losses"][::-1]})
    with pytest.raises(UserError, match="arxiv"):
        files.read(directory)


def test_domain_without_blocks_is_refused(directory):
    with np.load(directory / "blocks.npz") as stored:
        arrays = {key: value for key, value in stored.items() if not key.startswith("github/")}
    np.savez(directory / "blocks.npz", **arrays)
    with pytest.raises(UserError, match="github"):
        files.read(directory)


def test_runs_with_different_schedules_are_merged():
    import dataclasses

    full = dataclasses.replace(run("m", last=3.0, shares=(1.0,)), label="full")
    half = dataclasses.replace(run("m", last=3.1, shares=(0.5,)), label="half", schedule=0.5)
    other = run("m", rate=2, shares=(1.0,))
    merged = files.merged([half, full, other])
    assert [r.label for r in merged] == ["full", other.label]
    assert [p.tokens for p in merged[0].ends] == [50_000_000, 100_000_000] and merged[0].points == full.points
    assert merged[0].last == full.last


def test_united_studies_have_each_run_once():
    config = {"manifest": "same", "config": {"optim": {"lr": 2e-3}, "train": {"ends": [1.0]}}}
    one = records([run(m, metadata=config, rate=2) for m in ("reference", "a")], blocks=4, name="one")
    two = records([run(m, metadata=config, rate=1) for m in ("b", "a")], blocks=4, name="two")
    united = files.united(one, [two])  # both are 2e-3: rate 2 in the first study, rate 1 in the second
    assert [(r.model, r.rate) for r in united.runs] == [("reference", 2), ("a", 2), ("b", 2)] and united.asks == ("a",)
    for study, model in ((one, "a"), (two, "b")):
        row = next(r for r in study.runs if r.model == model).last.row
        joined = next(r for r in united.runs if r.model == model).last.row
        np.testing.assert_array_equal(united.blocks.losses["c4"][joined], study.blocks.losses["c4"][row])
    assert files.united(one, [records(two.runs, name="two")]).blocks is None


def test_studies_with_different_data_do_not_unite():
    one = records([run("reference", metadata={"manifest": "x"})], name="one")
    with pytest.raises(UserError, match=r"two .*data than one"):
        files.united(one, [records([run("a", metadata={"manifest": "y"})], name="two")])
