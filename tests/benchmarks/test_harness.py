"""Test benchmarks.harness: flags, files, tables, timing, model names, and the scripts' help."""

import json
import re
import subprocess
import sys
import time

import jax
import pytest
from matplotlib.collections import LineCollection

from benchmarks.harness import configs, options, plot, report, timing, trace
from benchmarks.harness.machine import machine
from seqjax import presets
from seqjax.errors import UserError
from tests import support

ASK_FOR_HELP = """
import runpy, sys
for module in sys.argv[1:]:
    sys.argv[1:] = ["--help"]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, (module, end.code)
    else:
        raise AssertionError(module + " ignores --help")
    heavy = {"jax", "numpy", "matplotlib", "flax", "grain", "torch"} & set(sys.modules)
    assert not heavy, (module, heavy)
"""


def require_light_help(folder: str) -> None:
    """Check that `--help` of each script in `folder` shows its usage and imports no heavy package."""
    names = sorted(path.stem for path in (support.ROOT / folder).glob("*.py") if path.stem != "__init__")
    modules = [f"{folder.replace('/', '.')}.{name}" for name in names]
    assert modules
    done = subprocess.run(
        [sys.executable, "-c", ASK_FOR_HELP, *modules], cwd=support.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for module in modules:
        assert f"usage: python -m {module} " in done.stdout
        command = rf"    python -m {re.escape(module)}( (--(data|run)=[A-Z]+ )?\[|$)"
        assert re.search(command, done.stdout, re.M), module


def test_help_imports_no_heavy_package() -> None:
    require_light_help("benchmarks")


def test_list_flags_and_unknown_words() -> None:
    parser = options.flags("What it does.", quick="small")
    parser.add_argument("--cases", type=options.words, default=[])
    parser.add_argument("--lengths", type=options.integers, default=[])
    args = parser.parse_args(["--cases=a,b", "--lengths=2048,102400", "--quick"])
    assert (args.cases, args.lengths, args.quick, args.json) == (["a", "b"], [2048, 102400], True, "")
    with pytest.raises(UserError, match=r"--cases=elemnt .*'element'.*window"):
        options.check_known("cases", ["window", "elemnt"], ["element", "window"])


def test_only_a_complete_run_replaces_recorded_results() -> None:
    assert options.destination("", "decode", recorded=True) == options.RECORDED / "decode.json"
    assert options.destination("", "decode", recorded=False) == options.UNRECORDED / "decode.json"
    assert options.destination("a/b.json", "decode", recorded=True).as_posix() == "a/b.json"


def test_table_scales_aligns_and_shows_errors() -> None:
    columns = (report.Column("tokens_per_s", "ktok/s", ">9.1f", 1e-3), report.Column("mfu", "MFU", ">8.1%"))
    table = report.Table(10, columns)
    assert table.header() == "             ktok/s     MFU"
    assert table.row("mamba2", {"tokens_per_s": 304_745, "mfu": 0.235}) == "mamba2        304.7   23.5%"
    assert table.row("mamba2", {"tokens_per_s": 0.0, "mfu": None}) == "mamba2          0.0       -"
    assert table.row("mamba2", {"error": "out of memory\nand more"}) == "mamba2      out of memory"
    assert report.markdown(("a", "b"), [("x", "1")]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_differences_between_reports() -> None:
    new = {"machine": {"device": "H100", "load": 1}, "settings": {"batch": 16, "size": "110m"}}
    old = {"machine": {"device": "H200", "load": 2}, "settings": {"batch": 8, "size": "110m"}}
    assert report.differences(new, old) == ["device H100, recorded with H200", "batch 16, recorded with 8"]
    assert report.differences(new, new) == []


def test_report_round_trip(tmp_path) -> None:
    written = {"machine": machine(), "results": [1.5]}
    report.save(tmp_path / "new" / "x.json", written)
    assert report.load(tmp_path / "new" / "x.json") == json.loads(json.dumps(written))
    assert written["machine"]["device"] == jax.devices()[0].device_kind
    assert written["machine"]["versions"]["jax"] == jax.__version__
    assert {"backend", "cores", "load", "python", "commit"} <= set(written["machine"])


def test_time_per_call() -> None:
    calls = []
    seconds = timing.seconds_per_call(lambda: calls.append(time.sleep(0.02)), calls=3, repeats=2)
    assert len(calls) == 6
    assert all(0.02 <= s < 0.06 for s in seconds) or min(seconds) >= 0.02  # a busy machine only takes longer
    assert timing.calls_within(lambda: time.sleep(0.02), 0.0) == 1
    assert 1 <= timing.calls_within(lambda: time.sleep(0.002), 0.1) <= 50
    assert timing.calls_within(lambda: None, 0.1, at_most=7) == 7


def test_model_names() -> None:
    assert configs.label("top1_chunk:model.mixer.selection=approx") == "top1_chunk approx"
    assert (
        configs.label("transformer_pp:model.mixer.window=256,model.dtype=float32")
        == "transformer_pp window=256 float32"
    )
    assert configs.chosen([]) == presets.names()
    assert options.configs("mamba2,top1_chunk:x=1") == ["mamba2", "top1_chunk:x=1"]
    assert options.configs("top1_chunk:x=1,y=2;mamba2") == ["top1_chunk:x=1,y=2", "mamba2"]
    assert options.configs("top1_chunk:x=1,y=2;") == ["top1_chunk:x=1,y=2"]
    with pytest.raises(UserError, match=r"--mixers=mamba22 .*'mamba2'"):
        configs.chosen(["rwkv7", "mamba22:x=1"])
    config = configs.configured("top1_chunk:model.mixer.selection=exact", "110m", batch=16, seq_len=0, remat="dots")
    assert (config.train.accumulate, config.train.batch_size, config.train.seq_len) == (1, 16, 2048)
    assert (config.model.remat, config.model.mixer.selection) == ("dots", "exact")


def test_bars_show_values_and_whiskers(tmp_path, monkeypatch) -> None:
    figures = []
    monkeypatch.setattr(plot, "save", lambda made, path: figures.append(made))
    plot.bars(
        tmp_path / "x.png",
        [plot.Bar("fast", 513.53, (500.0, 520.0)), plot.Bar("slow", 0.04873)],
        title="Speed",
        axis="k",
    )
    (axes,) = figures[0].axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["fast", "slow"]
    assert {"514", "0.0487"} <= {text.get_text() for text in axes.texts}
    # A whisker goes from the slowest to the fastest repeat. Without repeats there is none.
    (whiskers,) = (c.get_segments() for c in axes.collections if isinstance(c, LineCollection))
    assert [[point.tolist() for point in whisker] for whisker in whiskers] == [[[500, 0], [520, 0]]]
    assert "slowest and fastest repeat" in axes.get_xlabel()
    plot.bars(tmp_path / "x.png", [plot.Bar("fast", 513.53)], title="Speed", axis="k")
    assert not figures[1].axes[0].collections and figures[1].axes[0].get_xlabel() == "k"
    assert axes.yaxis_inverted()


def test_kernel_times_are_per_call_and_by_name(monkeypatch):
    """Two calls of two layers with the same kernel, and one with another."""
    ms = 1e6
    ran = [trace.Kernel("gpu", f"fusion.{i}", 0, ms, f"solve_{i}") for i in range(4)]
    ran.append(trace.Kernel("gpu", "custom-call", 0, 8 * ms, "keys"))
    monkeypatch.setattr(trace, "kernels", lambda directory: ran)
    assert trace.kernel_ms(lambda: jax.numpy.zeros(1), calls=2) == {"keys": 4, "solve": 2}
