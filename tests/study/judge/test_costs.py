"""Model costs from workdirs with known metrics rows."""

import dataclasses
import json

import pytest

from seqjax.study.judge import costs, plan
from seqjax.study.judge.costs import Cost
from seqjax.study.judge.plan import PUBLISHED, SAME_BLOCK
from seqjax.study.runs.runner import Run
from tests.study.judge.test_page import example_plan


def test_remarks_name_devices_and_shared_cpus():
    def remarks(**changes):
        cost = Cost(100.0, None, {}, frozenset({"cpu"}), 1)
        return " ".join(costs.remarks({"ema": dataclasses.replace(cost, **changes), SAME_BLOCK: cost, PUBLISHED: cost}))

    assert remarks() == ""
    assert "ema: NVIDIA H200, cpu" in remarks(devices=frozenset({"cpu", "NVIDIA H200"}))
    assert "CPU (ema)" in remarks(concurrent=2)
    assert "speed of ema " in remarks(tokens_per_s=None)


def workdir(path, speeds, peak, *, device="NVIDIA H200"):
    path.mkdir()
    rows = [{"step": n, "tokens_per_s": speed, "device_peak_gib": peak} for n, speed in enumerate(speeds)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (path / "run.json").write_text(json.dumps({"device": device}))
    return path


def test_cost_has_median_speed_and_peak_memory(tmp_path):
    config = plan.read("mamba2:debug")
    runs = []
    for i, (speeds, peak) in enumerate([((1.0, 10.0, 12.0), 3.0), ((11.0, 13.0), 4.0)]):
        runs.append(Run(i, f"{i}", workdir(tmp_path / f"{i}", speeds, peak), None, model="ema"))
    costs.note_jobs(runs[0], jobs=2)
    costs.note_jobs(runs[0], jobs=1)
    cost = costs.cost(config, runs)
    assert dataclasses.replace(cost, state_bytes={}) == Cost(11.0, 4.0, {}, frozenset({"NVIDIA H200"}), 2)
    assert cost.state_bytes == costs.state_bytes(config, on_cpu=False)
    unmeasured = costs.cost(config, [])
    assert unmeasured == Cost(None, None, costs.state_bytes(config, on_cpu=True), frozenset(), 1)


@pytest.mark.parametrize("device", ["NVIDIA H200", "cpu"])
def test_speed_table_leaves_out_runs_that_shared_a_cpu(tmp_path, device):
    judged_plan = example_plan()
    names = (judged_plan.model, SAME_BLOCK)
    runs = [
        Run(i, name, workdir(tmp_path / f"{i}", (i + 1.0,), 1.0, device=device), None, model=name)
        for i, name in enumerate(names)
    ]
    (table,) = costs.speeds(judged_plan, runs).values()
    assert table == {"card": device, "length": 128, "tokens_per_s": {"ema": 1.0, SAME_BLOCK: 2.0}}
    costs.note_jobs(runs[0], jobs=2)
    assert (costs.speeds(judged_plan, runs) == {}) == (device == "cpu")


def test_speed_table_needs_one_device(tmp_path):
    judged_plan = example_plan()
    names, devices = (judged_plan.model, SAME_BLOCK), ("NVIDIA H200", "NVIDIA H100")
    runs = [
        Run(i, name, workdir(tmp_path / name, (1.0,), 1.0, device=device), None, model=name)
        for i, (name, device) in enumerate(zip(names, devices, strict=True))
    ]
    assert costs.speeds(judged_plan, runs) == {}


def test_state_grows_for_attention_only():
    states = {name: costs.state_bytes(plan.read(f"{name}:debug"), on_cpu=True) for name in ("transformer_pp", "mamba2")}
    assert states["transformer_pp"][128] - states["transformer_pp"][64] == 64 * 2 * 2 * 64 * 4  # K and V in two layers
    assert states["mamba2"][128] == states["mamba2"][64]
