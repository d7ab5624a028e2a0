"""Test the average of nvidia-smi samples in lab.benchmarks.power."""

import sys
import time

import pytest

from lab.benchmarks import power


def test_power_is_the_mean_of_the_samples(monkeypatch) -> None:
    lines = "\\n".join(["9, 9, 700"] * 4 + ["600, 1500, 700", "640, 1700, 700"] * 4 + ["9, 9, 700"])
    monkeypatch.setattr(power, "QUERY", [sys.executable, "-c", f"print('{lines}', flush=True)"])
    row = power.sampled(lambda: time.sleep(0.01), seconds=0.02)
    assert (row["watts"], row["mhz"], row["limit_watts"]) == (620, 1600, 700)
    assert row["joules"] == pytest.approx(row["ms"] * 0.62)
    monkeypatch.setattr(power, "QUERY", [sys.executable, "-c", "print('1, 2, 3')"])
    with pytest.raises(RuntimeError, match="--seconds"):
        power.sampled(lambda: None, seconds=0.01)
