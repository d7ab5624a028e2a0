"""The study: gaps at equal loss from synthetic runs whose answer is known, and the command on real files."""

import json

import pytest

from seqjax.config import from_config_dict
from seqjax.data import slimpajama
from seqjax.errors import UserError
from seqjax.study import __main__ as study
from seqjax.study.protocol import common_losses, gap_rows, loss_at, read_points
from tests import support


def write_run(directory, *, offset: float, losses: list[float]):
    """A run whose arxiv loss is its training loss + 1 + offset; a line of the progress in between is no point."""
    directory.mkdir(parents=True)
    lines = []
    for i, loss in enumerate(losses):
        lines.append({"step": i, "tokens": 100 * i, "train/loss": 9.0, "seconds": 1.0})
        evals = {"eval/c4/loss": loss + 0.1, "eval/arxiv/loss": loss + 1 + offset}
        lines.append({"step": i, "tokens": 100 * i, "train/loss": loss, **evals})
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return directory


@pytest.fixture
def runs(tmp_path):
    fast = write_run(tmp_path / "fast", offset=0.25, losses=[5.0, 4.0, 3.0, 2.0])
    slow = write_run(tmp_path / "slow", offset=0.0, losses=[5.5, 4.5, 3.5, 2.5])
    return {"fast": fast, "slow": slow}


def test_points_are_the_evaluations(runs):
    points = read_points(runs["fast"])
    assert [p.train_loss for p in points] == [5.0, 4.0, 3.0, 2.0]
    assert points[1].domains == {"c4": 4.1, "arxiv": 5.25}
    assert [p.train_loss for p in read_points(runs["fast"], against=("c4",))] == [5.1, 4.1, 3.1, 2.1]


def test_the_gap_is_taken_at_equal_training_loss(runs):
    """The faster run has the lower arxiv loss at every step and is still the worse one at equal training loss."""
    points = {name: read_points(path) for name, path in runs.items()}
    assert points["fast"][-1].domains["arxiv"] < points["slow"][-1].domains["arxiv"]
    rows = gap_rows(points, ["arxiv"], reference="slow")
    for row in rows:
        assert row["arxiv_gap"] == pytest.approx(0.25 if row["run"] == "fast" else 0.0)
        assert row["arxiv"] == pytest.approx(row["train_loss"] + 1 + row["arxiv_gap"])
    assert rows[-1]["train_loss"] == pytest.approx(2.5), "the lowest loss that both have reached"


def test_no_extrapolation(runs):
    points = read_points(runs["slow"])
    assert loss_at(points, "arxiv", 2.4) is None
    assert loss_at(points, "arxiv", 3.0) == pytest.approx(4.0)


def test_runs_that_never_meet(tmp_path):
    points = {
        "a": read_points(write_run(tmp_path / "a", offset=0, losses=[5.0, 4.0])),
        "b": read_points(write_run(tmp_path / "b", offset=0, losses=[3.0, 2.0])),
    }
    with pytest.raises(UserError, match="no training loss in common"):
        common_losses(points)


SHIPPED = sorted(path for path in (support.ROOT / "configs" / "studies").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_studies_build(path):
    found = study.load_study(path)
    workdirs = [run["workdir"] for run in found["runs"].values()]
    assert len(set(workdirs)) == len(workdirs) >= 2, "runs in one directory"
    configs = [from_config_dict(run["config"]) for run in found["runs"].values() if "config" in run]
    assert len(configs) in (0, len(workdirs))
    assert len({config.model for config in configs}) == len(configs), "two runs of one model"
    for config in configs:
        assert set(found["domains"]) <= set(slimpajama.REGIMES[config.data.regime].eval)


def write_study(path, runs, **more):
    entries = {name: {"workdir": str(directory)} for name, directory in runs.items()}
    values = {"title": "t", "reference": "slow", "domains": ("arxiv",), "runs": entries} | more
    path.write_text(f"def get_study():\n    return {values!r}\n")
    return path


def test_command_writes_table_points_and_picture(runs, tmp_path, capsys):
    path = write_study(tmp_path / "study.py", runs)
    study.main([f"--study={path}", f"--out={tmp_path / 'out'}"])
    assert "| 2.500 | fast | 3.750 (+0.250) |" in capsys.readouterr().out
    points = (tmp_path / "out" / "points.csv").read_text().splitlines()
    assert len(points) == 1 + 2 * 4 * 2
    assert points[1] == "fast,0,0,5.000000,c4,5.100000"
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_command_compares_at_the_loss_of_the_domains_named_in_against(runs, tmp_path, capsys):
    """At equal loss of c4, which differs from the training loss by 0.1 in one run and by 0.6 in the other."""
    slow = runs["slow"] / "metrics.jsonl"
    lines = [json.loads(line) for line in slow.read_text().splitlines()]
    lines = [x | {"eval/c4/loss": x["eval/c4/loss"] + 0.5} if "eval/c4/loss" in x else x for x in lines]
    slow.write_text("\n".join(map(json.dumps, lines)) + "\n")
    path = write_study(tmp_path / "study.py", runs, against=("c4",))
    study.main([f"--study={path}", f"--out={tmp_path / 'out'}"])
    shown = capsys.readouterr().out
    assert "(+0.750)" in shown
    assert "(+0.250)" not in shown


def test_the_lowest_half_nat_is_compared(runs):
    """Higher losses, where words' frequencies are learned, are left out though both runs have passed through them."""
    points = {name: read_points(path) for name, path in runs.items()}
    assert common_losses(points, count=3) == pytest.approx([3.0, 2.75, 2.5])


def test_errors_name_the_fix(runs, tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        study.load_study(tmp_path / "absent.py")
    with pytest.raises(UserError, match="reference"):
        study.load_study(write_study(tmp_path / "study.py", runs, reference="other"))
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        read_points(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    with pytest.raises(UserError, match="no evaluation yet"):
        read_points(tmp_path)
