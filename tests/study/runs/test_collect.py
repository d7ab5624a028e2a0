"""Evaluations read from a workdir, and stored block losses."""

import json

import numpy as np
import pytest

from seqjax.errors import UserError
from seqjax.study.runs import collect, files
from seqjax.study.runs.record import UNITS, in_domain, losses
from seqjax.study.runs.studies import load_study
from tests.study.synthetic import DOMAINS, write_run, write_study, write_trunk

AGAINST = ("commoncrawl", "c4")


def collected(tmp_path, entries, **more):
    study = load_study(write_study(tmp_path / "study.py", entries))
    return collect.collect(study.runs, [*DOMAINS, *AGAINST], **more), {run.label: run.workdir for run in study.runs}


def test_points_are_the_evaluations(tmp_path):
    """Progress rows are no points; a run with a linear schedule has one end."""
    (run,), _ = collected(tmp_path, {"slow": write_run(tmp_path / "slow", [5.0, 4.0, 3.0], offset=0.25)})
    assert in_domain(run.points, AGAINST) == pytest.approx([5.0, 4.0, 3.0], abs=1e-6)
    assert in_domain(run.points, ()) == pytest.approx([4.8, 3.8, 2.8])
    assert losses(run.points, ["arxiv"])[:, 0] == pytest.approx([6.25, 5.25, 4.25], abs=1e-6)
    assert set(run.points[0].means) == {"equal", "natural"}
    assert run.ends == run.points[-1:] and not run.is_wsd and run.metadata["tokens_per_s"] == 5.0


def test_wsd_points_are_the_ends(tmp_path):
    workdir = write_trunk(tmp_path / "slow", {0.5: 3.0, 1.0: 2.5}, lambda domain, x: x + 1)
    (run,), _ = collected(tmp_path, {"slow": workdir})
    assert [point.step for point in run.points] == [500, 1000] and run.ends == run.points and run.is_wsd
    assert in_domain(run.ends, AGAINST) == pytest.approx([3.0, 2.5], abs=1e-6)
    assert run.metadata["tokens_per_s"] == 5.0, "the median: of two ends 5, of the trunk 4"


def test_unit_selects_the_evaluation_field(tmp_path):
    workdir = write_run(tmp_path / "slow", [4.0])
    (run,), _ = collected(tmp_path, {"slow": workdir}, unit=UNITS["bits_per_byte"])
    assert in_domain(run.points, AGAINST) == pytest.approx([1.0], abs=1e-6) and not run.points[0].means


def test_workdir_without_evaluation_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        collect.read_points(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    with pytest.raises(UserError, match=r"config\.eval\.every"):
        collect.read_points(tmp_path)


@pytest.mark.parametrize("config", [{"data": 7}, {"data": {"tokenizer": ["byte"]}}, {"train": []}], ids=str)
def test_malformed_config_is_refused(tmp_path, config):
    workdir = write_run(tmp_path / "slow", [4.0, 2.0])
    (workdir / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"slow/config\.json: (data|train)\b"):
        collected(tmp_path, {"slow": workdir})


def test_block_losses_are_thinned_to_fit(tmp_path):
    """First to float16, then to each run's last evaluations."""
    entries = {name: write_run(tmp_path / name, [5.0, 4.0, 3.0, 2.0]) for name in ("slow", "x")}
    entries |= {"y": write_run(tmp_path / "y", [5.0, 4.0])}
    runs, workdirs = collected(tmp_path, entries)
    about = {"title": "t", "references": ["slow"], "domains": list(DOMAINS), "against": list(AGAINST)}
    # 10 evaluations with 96 blocks, and 20 KiB for the rest of the file.
    full, rest = 96 * 10 * 4, 20_480 + 8 * 96
    results = []
    for size in (full, full // 2, full // 5):
        messages = files.write(
            tmp_path / "out", runs, study=about, missing={}, workdirs=workdirs, max_bytes=rest + size
        )
        with np.load(tmp_path / "out" / "blocks.npz") as arrays:
            results.append((arrays["arxiv/losses"].dtype, len(arrays["arxiv/losses"]), len(messages)))
        for run in files.read(tmp_path / "out").runs:  # `read` compares block means with points.csv
            assert files.read(tmp_path / "out").blocks.losses["arxiv"][run.last.row].mean() > 0
    # One message says that these runs have no identity.
    assert results == [(np.float32, 10, 1), (np.float16, 10, 2), (np.float16, 3, 3)]
    assert "the last 1 evaluations of each run" in messages[1]
