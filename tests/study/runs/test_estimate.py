"""`seqjax study --dry_run`: remaining work and speeds, against hand counts."""

import json

import pytest

from seqjax.models import Model, flops
from seqjax.study import __main__ as study
from seqjax.study.runs import estimate
from seqjax.study.runs.studies import load_study
from seqjax.training import dry_run
from tests import support
from tests.study.synthetic import write_run, write_study

SETTINGS = "debug,train.seq_len=32,train.steps=10,train.batch_size=4,optim.warmup_steps=1,eval.every=512,eval.tokens=64"


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    monkeypatch.setattr(dry_run, "CPU_FLOPS", 0)


@pytest.fixture
def runs(tmp_path):
    """Write a study: a run at step 2 of 10, its second seed, another model, a read-only run.

    The first run has a speed of 5 tokens/s."""
    config = f"{support.ROOT}/configs/transformer_pp.py:{SETTINGS}"
    entries = {
        "slow": {"workdir": str(write_run(tmp_path / "slow", [5.0, 4.0, 3.0])), "config": config},
        "slow, seed 1": {
            "workdir": str(tmp_path / "new"),
            "config": f"{config},train.seed=1,data.seed=1",
            "model": "slow",
            "seed": 1,
        },
        "other": {"workdir": str(tmp_path / "other"), "config": config.replace("transformer_pp", "mamba2")},
        "read": {"workdir": str(write_run(tmp_path / "read", [5.0, 4.0, 3.0]))},
    }
    return write_study(tmp_path / "study.py", entries)


def test_remaining_work_is_counted(runs, capsys):
    loaded = load_study(str(runs)).runs
    begun, seed, other, read = (estimate.estimate_run(run, loaded) for run in loaded)
    assert read is None
    assert (begun.steps, begun.tokens) == (8, 8 * 4 * 32)
    assert (seed.steps, seed.tokens) == (10, 10 * 4 * 32)
    # Five domains with 64 tokens, after 512 and 1,024 tokens and at the end, at a third of the training cost.
    assert begun.seconds == pytest.approx((1024 + 3 * 5 * 64 / 3) / 5.0)
    assert seed.seconds == pytest.approx((1280 + 3 * 5 * 64 / 3) / 5.0)
    assert begun.flops / begun.tokens == pytest.approx(seed.flops / seed.tokens)
    assert other.seconds is None
    study.main([f"--study={runs}", "--dry_run", "--jobs=2"])
    shown = capsys.readouterr().out.splitlines()
    assert "read only" in shown[3]
    assert shown[2].endswith("time unknown")
    hours = (begun.seconds + seed.seconds) / 3600
    assert shown[4].startswith(f"3 of 4 runs left, 0.0M tokens, {hours:.1f} device hours, excluding 1 with")
    assert shown[4].endswith("with 2 runs at a time")


def test_recorded_speed_needs_a_matching_model(runs, monkeypatch, tmp_path):
    """Name, parameters, FLOPs per token and length must match."""
    run = load_study(str(runs)).runs[2]
    model = Model(run.config.model, max_len=32)
    speed = {"file": "a.json", "device": "a device", "size": "debug", "seq_len": 32, "batch": 1, "remat": "none"}
    speed |= {"tokens_per_s": 7.0, "params": flops.n_params(model)}
    speed |= {"flops_per_token": flops.flops_per_token(model, 32)}
    path = tmp_path / "speeds.json"
    monkeypatch.setattr(dry_run, "SPEEDS", path)

    def record(**changes):
        entries = [speed | {"name": "transformer_pp"}, speed | {"name": "mamba2"} | changes]
        path.write_text(json.dumps({"speeds": entries}))

    record()
    estimated = estimate.estimate_run(run, [run])
    assert estimated.seconds == pytest.approx((1280 + 3 * 5 * 64 / 3) / 7.0)
    assert estimated.source == "recorded on one a device"
    for share, seconds in ((1.04, estimated.seconds), (0.96, estimated.seconds), (1.06, None), (0.94, None)):
        n_params = round(share * speed["params"])
        record(params=n_params)
        similar = estimate.estimate_run(run, [run])
        assert similar.seconds == seconds
        assert similar.source == ("recorded with other settings of the mixer on one a device" if seconds else "")
        assert (
            dry_run.recorded_speed(
                run.config,
                n_params=n_params + 1,
                per_token=speed["flops_per_token"],
                device=None,
            )
            is None
        )


def test_model_without_recorded_speed_is_timed_once(runs, monkeypatch, capsys):
    configs = []

    def measure(config, *, timed, say):
        configs.append((config.name, timed))
        return dry_run.Measured(64.0 if timed else None, "" if timed else "a step needs 9 GiB, MORE than the 8 GiB")

    monkeypatch.setattr(dry_run, "measure", measure)
    study.main([f"--study={runs}", "--dry_run"])
    shown = capsys.readouterr().out.splitlines()
    assert configs == [("transformer_pp", False), ("mamba2", True)], "of the first, a run tells the speed"
    # Three evaluations of five domains with 64 tokens, at a third of the training cost.
    assert shown[2].endswith(f"{round((1280 + 3 * 5 * 64 / 3) / 64)}s ({dry_run.TIMED})")
    assert "without" not in shown[4] and shown[5] == "slow: a step needs 9 GiB, MORE than the 8 GiB"
