"""Weights & Biases logging through `TrainLog`, with a stand-in package that records its calls."""

import json
import re
import sys

import numpy as np
import pytest

from seqjax.config import to_dict
from seqjax.errors import UserError
from seqjax.training.train_log import TrainLog
from tests import support

# The part of the package that seqjax uses. After a resume, `step` is the last logged step plus one.
STAND_IN = """
import json, os, pathlib

class Error(Exception):
    pass

class Run:
    def __init__(self, path, step):
        self.path, self.step = path, step

    def log(self, values, step):
        assert step >= self.step
        self.step = step
        self.record({"log": values, "step": step})

    def finish(self):
        self.record({"finish": self.step})

    def record(self, row):
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\\n")

def init(**options):
    if os.environ.get("STAND_IN_FAILS"):
        raise Error("api_key not configured")
    path = pathlib.Path(options["dir"], "recorded.jsonl")
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    run = Run(path, 1 + max((row["step"] for row in rows if "log" in row), default=-1))
    run.record({"init": options})
    return run
"""
VALUES = {"loss": 2.0, "grad_norm": 1.0, "param_norm": 3.0, "lr": 1e-3}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


@pytest.fixture
def workdir(tmp_path):
    directory = tmp_path / "my_run"
    directory.mkdir()
    return directory


def make_log(workdir, blocks_dir, *, lead=True, **settings) -> TrainLog:
    return TrainLog(workdir, support.run_config(blocks_dir, **settings), end=20, lead=lead, flops_per_token=1.0)


def recorded_rows(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "recorded.jsonl").read_text().splitlines()]


def test_resumed_run_continues_its_wandb_run(stand_in, workdir, blocks_dir, capsys):
    with make_log(workdir, blocks_dir, log__wandb="my_project") as log:
        log.start(0, None, {})
        log.step(1, VALUES)
        state = log.state
        for step in (2, 3):  # after the checkpoint; a kill loses these steps
            log.step(step, VALUES)
    with make_log(workdir, blocks_dir, log__wandb="my_project") as log:
        log.start(1, state, {})
        for step in (2, 3, 4):
            log.step(step, VALUES)
        log.evaluation(4, {"eval/c4/loss": 2.5}, {"c4": np.ones(2)})
    shown = capsys.readouterr().err
    assert re.search(
        r"^step 4: evaluation loss .*nats/token c4 2\.500 \| training loss 2\.000, .* 4 steps$", shown, re.M
    )
    rows = recorded_rows(workdir)
    first, second = (row["init"] for row in rows if "init" in row)
    assert first == second
    assert (first["project"], first["resume"], first["name"]) == ("my_project", "allow", "my_run")
    assert first["id"] == json.loads((workdir / "wandb.json").read_text())["id"]
    assert first["config"] == to_dict(support.run_config(blocks_dir, log__wandb="my_project"))
    logged = [row for row in rows if "log" in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 4], "only the evaluation repeats a step"
    assert logged[0]["log"]["train/loss"] == 2.0
    assert "mfu" not in logged[0]["log"], "only numbers"
    assert logged[-1]["log"]["eval/c4/loss"] == 2.5
    assert [row["finish"] for row in rows if "finish" in row] == [3, 4]
    assert len((workdir / "metrics.jsonl").read_text().splitlines()) == 5


def test_passwords_are_not_sent(stand_in, workdir, blocks_dir):
    settings = {"data__path": "https://user:pw@host/a", "eval__path": ("https://host/a?token=pw",)}
    with make_log(workdir, blocks_dir, log__wandb="my_project", **settings) as log:
        log.start(0, None, {})
    sent = recorded_rows(workdir)[0]["init"]["config"]
    assert (sent["data"]["path"], sent["eval"]["path"]) == ("https://***@host/a", ["https://host/a?token=***"])


def test_only_process_0_writes(stand_in, workdir, blocks_dir):
    with make_log(workdir, blocks_dir, lead=False, log__wandb="my_project") as log:
        log.start(0, None, {})
        log.step(1, VALUES)
    assert not list(workdir.iterdir())
    assert "wandb" not in sys.modules


def test_wandb_is_not_imported_by_default(stand_in, workdir, blocks_dir):
    with make_log(workdir, blocks_dir) as log:
        log.start(0, None, {})
    assert "wandb" not in sys.modules
    assert not (workdir / "wandb.json").exists()


def test_missing_package_error_names_the_extra(workdir, blocks_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = make_log(workdir, blocks_dir, log__wandb="my_project")
    with pytest.raises(UserError, match=r"config\.log\.wandb='my_project'.*pip install 'seqjax\[wandb\]'"):
        log.start(0, None, {})


def test_wandb_login_error_lists_remedies(stand_in, workdir, blocks_dir, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    log = make_log(workdir, blocks_dir, log__wandb="my_project")
    with pytest.raises(UserError, match=r"api_key .*wandb login.*WANDB_MODE=offline"):
        log.start(0, None, {})
