"""Test benchmarks.kernels: operation counts, small runs, and the plot."""

import json

import jax
import pytest

from benchmarks import kernels
from benchmarks.harness import limits, plot

TINY = limits.Sizes(1, 0, 2, 8, C=16, window=8, itemsize=4)


def test_counts_match_the_roofline_table() -> None:
    """12 heads of 64 at T = 102,400, computed by hand: TFLOP and GB forward and backward, ms on an H200."""
    n, h200 = limits.Sizes(1, 102400, 12, 64), limits.DEVICES["H200"]
    by_hand = {
        "attention": (16.1, 0.63, 40.3, 1.27),
        "element": (8.05, 0.63, 32.2, 1.27),
        "select-exact": (8.05, 0.315, None, None),
        "select-approx": (0.063, 0.315, None, None),
        "select-shortlist": (0.144, 0.315, None, None),
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
    with pytest.raises(ValueError, match="'dense'"):
        limits.phases("dense", n)


@pytest.mark.slow
def test_small_run_measures_each_case(tmp_path) -> None:
    rows = list(kernels.run(kernels.CASES, {32: 1}, TINY, dtype="float32", repeats=1, call_s=0, budget_s=60))
    if jax.default_backend() == "cpu":
        assert not [row for row in rows if "error" in row]
        assert {(row["case"], row["pass"]) for row in rows} >= {(case, "forward") for case in kernels.CASES}
        assert len(rows) == 23  # two passes (selections: one); approx has two schedules
    for row in rows:
        assert row["ms"] > 0
        assert row["case"] in kernels.line(row)
    report = {"machine": {"device": "a test"}, "settings": {"H": 2, "K": 8, "dtype": "float32"}, "results": rows}
    kernels.plot_report(json.loads(json.dumps(report)), tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 1000


def test_plot_of_one_length_has_at_least_two_ticks(tmp_path, monkeypatch) -> None:
    figures = []
    monkeypatch.setattr(plot, "save", lambda made, path: figures.append(made))
    row = {"case": "window", "implementation": "xla", "T": 2048, "B": 1, "pass": "forward", "ms": 3.1}
    written = {"machine": {"device": "a test"}, "settings": {"H": 2, "K": 8, "dtype": "float32"}}
    kernels.plot_report(written | {"results": [row, row | {"case": "element", "ms": 3.4}]}, tmp_path / "x.png")
    panel = figures[0].axes[0]
    for axis, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
        figures[0].draw_without_rendering()
        shown = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_text()]
        assert len(shown) >= 2


def test_selections_of_several_chunks_are_measured(tmp_path) -> None:
    cases = ["select-exact-top2", "select-approx-top4"]
    rows = list(kernels.run(cases, {64: 1}, TINY, dtype="float32", repeats=1, call_s=0, budget_s=60))
    assert {row["case"] for row in rows if row["ms"] > 0} == set(cases)
    report = {"machine": {"device": "a test"}, "settings": {"H": 2, "K": 8, "dtype": "float32"}, "results": rows}
    kernels.plot_report(report, tmp_path / "kernels.png")


def test_exceeded_budget_is_reported() -> None:
    rows = list(kernels.run(["window"], {32: 1}, TINY, dtype="float32", repeats=1, call_s=0, budget_s=-1))
    assert "--seconds=-1" in kernels.line(rows[0])


def test_rates_and_hardware_limit() -> None:
    row = kernels.rated({"ms": 2.0}, [limits.Work(1e12, 1e9), limits.Work(1e12, 4e9)], limits.Device(1e15, 1e12, 1e12))
    assert row == {"ms": 2.0, "tflops": 1000.0, "gbytes_per_s": 2500.0, "limit_ms": 5.0, "times_limit": 0.4}
