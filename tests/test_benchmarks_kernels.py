"""The parts of benchmarks.kernels and benchmarks.decode: their counts, and a run of a few milliseconds."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import decode, kernels, limits, power, scans

TINY = limits.Sizes(1, 0, 2, 8, C=16, window=8, itemsize=4)


def test_counts_are_those_of_the_roofline_table() -> None:
    """12 heads of 64 at T = 102,400, added up by hand: TFLOP and GB forward and backward, ms on an H200."""
    n, h200 = limits.Sizes(1, 102400, 12, 64), limits.DEVICES["H200"]
    by_hand = {
        "attention": (16.1, 0.63, 40.3, 1.27),
        "element": (8.05, 0.63, 32.2, 1.27),
        "select-exact": (8.05, 0.315, None, None),
        "select-approx": (0.063, 0.315, None, None),
    }
    for case, (flops, gigabytes, back_flops, back_gigabytes) in by_hand.items():
        forward, backward = limits.phases(case, n)
        assert sum(w.flops for w in forward) / 1e12 == pytest.approx(flops, rel=0.01)
        assert sum(w.bytes for w in forward) / 1e9 == pytest.approx(gigabytes, rel=0.01)
        assert bool(backward) == (back_flops is not None)
        for work in backward:
            assert work.flops / 1e12 == pytest.approx(back_flops, rel=0.01)
            assert work.bytes / 1e9 == pytest.approx(back_gigabytes, rel=0.01)
    attend, back = limits.phases("chunk-approx", n)[0][1], limits.phases("chunk-approx", n)[1][0]
    assert (attend.flops / 1e12, back.flops / 1e12) == pytest.approx((0.0605, 0.151), rel=0.01)
    assert 1e3 * limits.phases("attention", n)[0][0].limit_s(h200) == pytest.approx(20.4, rel=0.01)
    assert 1e3 * limits.phases("select-exact", n)[0][0].limit_s(h200) == pytest.approx(17.0, rel=0.01)
    assert limits.total(limits.training_phases("element", n)).flops / 1e12 == pytest.approx(48.3, rel=0.01)
    with pytest.raises(ValueError, match="no count for case 'dense'"):
        limits.phases("dense", n)


def test_a_tiny_run_measures_every_case(tmp_path) -> None:
    rows = list(kernels.run(kernels.CASES, {32: 1}, TINY, dtype="float32", repeats=1, call_s=0, budget_s=60))
    if jax.default_backend() == "cpu":
        assert not [row for row in rows if "error" in row]
        assert {(row["case"], row["pass"]) for row in rows} >= {(case, "forward") for case in kernels.CASES}
        assert len(rows) == 14  # two passes, but the selections have one; two schedules of approx
    for row in rows:
        assert row["ms"] > 0
        assert row["case"] in kernels.line(row)
    report = {"machine": {"device": "a test"}, "settings": {"H": 2, "K": 8, "dtype": "float32"}, "results": rows}
    kernels.plot(json.loads(json.dumps(report)), tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 1000


def test_over_budget_is_said() -> None:
    rows = list(kernels.run(["window"], {32: 1}, TINY, dtype="float32", repeats=1, call_s=0, budget_s=-1))
    assert "--seconds=-1 are over" in kernels.line(rows[0])


def test_a_rate_beside_its_limit() -> None:
    row = kernels.rated({"ms": 2.0}, [limits.Work(1e12, 1e9), limits.Work(1e12, 4e9)], limits.Device(1e15, 1e12, 1e12))
    assert row == {"ms": 2.0, "tflops": 1000.0, "gbytes_per_s": 2500.0, "limit_ms": 5.0, "times_limit": 0.4}


def test_decoding_in_a_tiny_run(tmp_path, capsys) -> None:
    n = decode.Sizes(2, 64, 2, 8, 16, spare=5, dtype="float32")
    rows = decode.run(n, 1, repeats=1, seconds=0)
    assert not [row for row in rows if "error" in row]
    assert rows[0]["bytes"] == 2 * 59 * 2 * 2 * 8 * 4
    assert {row["case"] for row in rows} == {"attention", "element", "chunk-exact", "chunk-approx"}
    assert "chunk-approx xla" in capsys.readouterr().out
    settings = n._asdict() | {"layers": 1}
    decode.plot({"machine": {"device": "a test"}, "settings": settings, "results": rows}, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").stat().st_size > 1000


def test_decoding_cases_agree_with_each_other() -> None:
    n = decode.Sizes(2, 64, 2, 8, 16, spare=5, dtype="float32")
    operands = decode.layer_operands(n, jax.random.key(0))
    outs = [decode.function("attention", name, n)(*operands, jnp.asarray(n.length)) for name in ("step", "jax.nn")]
    assert abs(outs[0] - outs[1]).max() < 1e-5


def test_power_is_the_mean_of_what_the_meter_says(monkeypatch) -> None:
    lines = "\\n".join(["9, 9, 700"] * 4 + ["600, 1500, 700", "640, 1700, 700"] * 4 + ["9, 9, 700"])
    monkeypatch.setattr(power, "QUERY", [sys.executable, "-c", f"print('{lines}', flush=True)"])
    row = power.sampled(lambda: time.sleep(0.01), seconds=0.02)
    assert (row["watts"], row["mhz"], row["limit_watts"]) == (620, 1600, 700)
    assert row["joules"] == pytest.approx(row["ms"] * 0.62)
    monkeypatch.setattr(power, "QUERY", [sys.executable, "-c", "print('1, 2, 3')"])
    with pytest.raises(RuntimeError, match="raise --seconds"):
        power.sampled(lambda: None, seconds=0.01)


@pytest.mark.parametrize("case", scans.CASES)
def test_recurrences_in_a_tiny_run(case) -> None:
    rows = scans.run(case, 1, 64, small=True, repeats=1, call_s=0)
    assert "xla" in rows
    assert all(row["forward_ms"] > 0 and row["training_ms"] > 0 for row in rows.values())


def test_the_error_is_that_of_the_worst_result() -> None:
    want = jnp.array([1.0, -4.0]), jnp.array([2.0])
    assert scans.difference((jnp.array([1.0, -3.0]), jnp.array([2.2])), want) == pytest.approx(0.25)
    assert scans.difference(want, want) == 0
