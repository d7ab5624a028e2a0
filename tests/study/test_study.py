"""The study: gaps at equal loss from synthetic runs whose answer is known, and the command on real files."""

import json
import math
import signal
import subprocess
import sys
import time

import pytest

from seqjax.data import slimpajama
from seqjax.errors import UserError
from seqjax.study import __main__ as study
from seqjax.study import runner
from seqjax.study.protocol import common_losses, gap_rows, loss_at, read_points
from seqjax.study.studies import load_study
from seqjax.train import train
from seqjax.training import block_losses, metrics
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
    found = load_study(str(path))
    assert len({run.workdir for run in found.runs}) == len(found.runs) >= 2, "runs in one directory"
    configs = [run.config for run in found.runs if run.config is not None]
    assert len(configs) in (0, len(found.runs))
    assert len({(config.model, config.train) for config in configs}) == len(configs), "the same run twice"
    for config in configs:
        assert set(found.domains) <= set(slimpajama.REGIMES[config.data.regime].eval)


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
        load_study(str(tmp_path / "absent.py"))
    with pytest.raises(UserError, match="reference"):
        load_study(str(write_study(tmp_path / "study.py", runs, reference="other")))
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        read_points(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    with pytest.raises(UserError, match="no evaluation yet"):
        read_points(tmp_path)


TINY = (
    "data.corpus=blocks,data.path={data},train.seq_len=32,train.steps=4,train.batch_size=8,model.dim=16,model.n_layers=1,"
    "model.mixer.heads=2,optim.warmup_steps=1,eval.every=512,eval.tokens=256,log.every=1,log.sample_tokens=0,"
    "log.tensorboard=False"
)


@pytest.fixture
def trained_study(blocks_dir, tmp_path):
    """Two runs that can be trained and, between them, one that fails: its learning rate makes it diverge."""
    tiny = TINY.format(data=blocks_dir)
    configs = {
        "slow": f"{support.ROOT}/configs/transformer_pp.py:debug,{tiny}",
        "bad": f"{support.ROOT}/configs/transformer_pp.py:debug,{tiny},optim.lr=1e30,optim.clip_norm=None",
        "fast": f"{support.ROOT}/configs/top1_chunk.py:debug,{tiny},model.mixer.chunk_size=8",
    }
    entries = {k: {"workdir": str(tmp_path / k), "config": config} for k, config in configs.items()}
    values = {"title": "t", "reference": "slow", "domains": ("arxiv",), "runs": entries}
    path = tmp_path / "study.py"
    path.write_text(f"def get_study():\n    return {values!r}\n")
    return path


def test_a_failed_run_does_not_stop_the_others(trained_study, tmp_path, capsys):
    study.main([f"--study={trained_study}", "--list"])
    assert capsys.readouterr().out.count("not begun") == 3
    with pytest.raises(UserError, match="1 of 3 runs failed: bad"):
        study.main([f"--study={trained_study}", f"--out={tmp_path / 'out'}", "--jobs=2"])
    out = capsys.readouterr().out
    assert "bad: failed with status 2" in out
    assert "not_finite" in out, "the last words of the run"
    rows = (tmp_path / "out" / "points.csv").read_text()
    assert "fast,4," in rows
    assert "bad" not in rows
    # What is complete is not trained again; --only trains nothing else.
    before = (tmp_path / "fast" / "metrics.jsonl").stat().st_mtime_ns
    study.main([f"--study={trained_study}", "--only=2"])
    assert (tmp_path / "fast" / "metrics.jsonl").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="the study has no such run"):
        study.main([f"--study={trained_study}", "--only=medium"])


def test_a_run_that_ended_early_is_not_taken_for_complete(trained_study, tmp_path, monkeypatch, capsys):
    """Somebody else sent it a signal: it saved, and its status is 0."""
    monkeypatch.setattr(runner, "_start", lambda *_: subprocess.Popen([sys.executable, "-c", ""]))
    with pytest.raises(UserError, match="1 of 1 runs failed: slow"):
        study.main([f"--study={trained_study}", "--only=slow"])
    assert "slow: ended early" in capsys.readouterr().out


def test_losses_of_blocks_are_kept_and_cut_at_a_resume(trained_study, tmp_path):
    runs = load_study(str(trained_study)).runs
    config = runs[0].config
    assert config is not None
    train(config, runs[0].workdir)
    blocks, losses = block_losses.read(runs[0].workdir)
    assert sorted(losses) == [2, 4]
    row = metrics.read(runs[0].workdir)[-1]
    for domain, of_domain in losses[4].items():
        assert of_domain.shape == blocks[f"{domain}/documents"].shape == blocks[f"{domain}/n_bytes"].shape
        assert float(of_domain.astype(float).mean()) == pytest.approx(row[f"eval/{domain}/loss"], rel=1e-6)
        nats = float(of_domain.astype(float).sum()) * 32
        bits = nats / math.log(2) / blocks[f"{domain}/n_bytes"].sum()
        assert bits == pytest.approx(row[f"eval/{domain}/bits_per_byte"], rel=1e-6)
    outside = [row[f"eval/{domain}/loss"] for domain in ("arxiv", "github", "stackexchange")]
    assert row["eval_mean/out_of_domain/equal"] == pytest.approx(sum(outside) / 3)
    assert min(outside) < row["eval_mean/out_of_domain/natural"] < max(outside)
    block_losses.start(runs[0].workdir, {}, step=2)
    assert sorted(block_losses.read(runs[0].workdir)[1]) == [2]


def test_a_signal_stops_all_runs_and_starts_none(trained_study, tmp_path):
    """The runs save where they are and the same command goes on; here they are stopped while they compile."""
    command = [sys.executable, "-m", "seqjax.study", f"--study={trained_study}", f"--out={tmp_path / 'out'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=support.ROOT)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "slow" / "log.txt").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert not (tmp_path / "bad").exists()
    assert not (tmp_path / "fast").exists()
