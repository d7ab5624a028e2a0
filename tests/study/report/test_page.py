"""report.html: its content, its behaviour in a browser, and no external files."""

import builtins
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from seqjax.errors import UserError
from seqjax.study import __main__ as study
from seqjax.study import gaps
from seqjax.study.report import forest, leaderboard, page, points, results, tables
from seqjax.study.report.words import in_words
from seqjax.study.runs import files
from seqjax.study.runs.studies import load_study
from tests import support
from tests.study.synthetic import write_run, write_study

pytestmark = pytest.mark.usefixtures("undrawn_pictures")
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the data of a study with two models; `fast` has two seeds and a config."""
    root = tmp_path_factory.mktemp("page")
    config = f"{support.ROOT}/configs/mamba2.py:debug,train.seq_len=32,train.steps=2,optim.warmup_steps=1"
    runs = {
        "slow": {"workdir": str(write_run(root / "slow", [5.0, 4.0, 3.0], noise=0))},
        "fast": {"workdir": str(write_run(root / "fast", [5.1, 4.1, 3.1], noise=1, offset=0.25)), "config": config},
        "fast, seed 1": {
            "workdir": str(write_run(root / "fast1", [5.2, 4.2, 3.2], noise=2, offset=0.3)),
            "model": "fast",
            "seed": 1,
        },
    }
    speeds = {"H100": {"card": "H100", "length": 99, "tokens_per_s": {"fast": 123.0, "slow": 7.0}}}
    path = write_study(root / "study.py", runs, title="a < b & c", speeds=speeds)
    results._write_data(load_study(path), root / "out", {})
    return root / "out"


def written_page(path: Path, records) -> str:
    """Write a study's page at `path` and return its text."""
    page.write(path, records, text=tables.report(records, leaderboard.compared(records)))
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def html(finished, tmp_path_factory):
    """Return the page of `finished`."""
    return written_page(tmp_path_factory.mktemp("html") / "report.html", files.read(finished))


def pictures_of(html: str) -> list[tuple[list[dict], dict]]:
    """Return each picture's plotly traces and layout."""
    pictures, decode = [], json.JSONDecoder().raw_decode
    for start in re.finditer(r'Plotly\.newPlot\(\s*"picture\d",\s*', html):
        traces, end = decode(html, start.end())
        layout, _ = decode(html, html.index("{", end))
        pictures.append((traces, layout))
    return pictures


def test_page_is_complete_and_self_contained(finished, html, tmp_path):
    pictures = [traces for traces, _ in pictures_of(html)]
    assert [[trace["name"] for trace in picture] for picture in pictures] == [
        [forest.TOKENS, forest.REFERENCE],
        ["slow", "fast", "fast"],
        ["slow", "fast", "fast"],
        ["slow", "fast"],
    ]
    assert pictures[0][0]["x"] == pytest.approx([0.425], abs=1e-5), "of both seeds, at equal tokens"
    losses = pictures[1][1]
    assert losses["x"] == pytest.approx([5.1, 4.1, 3.1], abs=1e-5)
    assert losses["y"] == pytest.approx([6.35, 5.35, 4.35], abs=1e-5)
    assert "arxiv 6.350" in losses["text"][0]
    assert pictures[3][1]["y"] == pytest.approx([0.425], abs=1e-5)
    out = shutil.copytree(finished, tmp_path / "out")
    study.main([f"--analyse={out}", "--page"])
    assert (out / "report.html").read_text(encoding="utf-8") == html, "the same bytes each time"
    plain = re.sub(r"</?strong>|\*", "", unescape(html[html.index("<h2>Gaps to slow") :]))
    for line in (out / "leaderboard.md").read_text().splitlines():
        for cell in re.findall(r"(?<=\| )[^|]+(?= \|)", line) if line.startswith("| ") else ():
            shown = unescape(re.sub(r"\\\*|\*\*", "", cell)).strip("-: ")
            assert f">{shown}</t" in plain or not shown, cell
    assert "<h1>a &lt; b &amp; c</h1>" in html
    assert not re.search(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="', html), "something is fetched"


def test_page_starts_with_verdicts_and_gaps(known, tmp_path):
    html = written_page(tmp_path / "report.html", known)
    headings = [unescape(text) for text in re.findall(r"<h[123]>(.*?)</h[123]>", html)]
    first = ["t", "Verdicts", "Against reference", "Gaps", "OOD loss over in-domain loss"]
    assert headings[: len(first)] == first
    assert headings.index("Gap over training speed") < headings.index("Gaps to reference") < headings.index("Runs")
    for words, models in in_words(known, "reference").items():
        assert f"<li><b>{words}</b>: {'; '.join(f'<span>{model}</span>' for model in models)}</li>" in html
    traces_by_name = {trace["name"]: trace for trace in pictures_of(html)[0][0]}
    assert set(traces_by_name) == set(forest.LOOKS)
    rows = {row.model: row for row in gaps.compare(known, "reference")}
    names = [text.split("</b>")[0].removeprefix("<b>") for text in traces_by_name[forest.GAP]["text"]]
    assert traces_by_name[forest.GAP]["x"] == pytest.approx([rows[name].gap.value for name in names])
    assert traces_by_name[forest.GAP]["error_x"]["array"] == pytest.approx([rows[name].gap.half for name in names])
    assert traces_by_name[forest.ONE_SEED]["x"] == pytest.approx([rows["alone"].gap.value])


def test_axes_have_units_and_room_for_the_first_points(html):
    pictures = pictures_of(html)
    for traces, layout in pictures:
        is_forest = traces is pictures[0][0]
        for name, axis in layout.items():
            if re.fullmatch(r"xaxis\d*" if is_forest else r"[xy]axis", name):
                assert re.search(
                    r"\((nats per token|nats per token; lower is better|millions|tokens/s)\)$", axis["title"]["text"]
                )
            if name in ("xaxis", "yaxis") and "range" in axis and not is_forest:
                low, high = sorted(axis["range"])
                values = [value for trace in traces for value in trace[name[0]]]
                assert low < min(values) and max(values) < high, f"{name} cuts points"
    for _, layout in pictures[1:3]:  # each domain in the menu has a range for its own values
        for button in layout["updatemenus"][0]["buttons"]:
            data, axes = button["args"]
            low, high = axes["yaxis.range"]
            assert all(low < value < high for y in data["y"] for value in y), button["label"]
        low, high = layout["xaxis"]["range"]
        assert low < high, "a loss increases to the right"


def test_legend_switches_all_seeds_of_a_model(known, tmp_path):
    """Other learning rates have a separate entry, hidden at first."""
    html = written_page(tmp_path / "report.html", known)
    several = ("reference", "dear", "gain", "shrinks", "far")
    expected = {name: (1 if name == "alone" else 3, True) for name in known.models}
    expected |= {f"{name}, other rates": (1, "legendonly") for name in several}
    for traces, layout in pictures_of(html)[1:3]:
        assert layout["legend"]["groupclick"] == "togglegroup"
        groups: dict[str, list[dict]] = {}
        for trace in traces:
            groups.setdefault(trace["legendgroup"], []).append(trace)
        assert list(groups) == list(expected)
        for name, group in groups.items():
            assert (len(group), group[0]["visible"]) == expected[name]
            assert {trace["name"] for trace in group} == {name}
            assert len({trace["visible"] for trace in group}) == 1
            assert [trace["showlegend"] for trace in group] == [True] + [False] * (len(group) - 1)
    assert html.count(page.CLICKS) == html.count(page.OTHER_RATES) == 1


def test_cost_table_uses_the_config(finished):
    """Mamba-2's decoding state is its matrix state and the convolution's last inputs."""
    study_records = files.read(finished)
    (fast,) = (run for run in study_records.runs if run.label == "fast")
    inner = 2 * 64  # the state is float32 on a CPU
    assert fast.metadata["state_bytes"] == 4 * 4 * (inner * 128 + 3 * (inner + 2 * 128))
    text = tables.report(study_records, leaderboard.compared(study_records))
    header, _, slow, row = (line for line in text.split("## Cost")[1].splitlines()[4:8])
    assert "| H100 | memory | state | GFLOPs/token | OOD difference to slow at equal tokens |" in header
    assert row.startswith("| fast | 5 | 123 | - | 0.3 MiB | 0.002 | +0.4")
    assert slow == "| slow | 5 | 7 | - | - | - | - |"
    assert points.run_speeds(study_records) == {"slow": 5.0, "fast": 5.0} and study_records.conditions == {
        "H100": ("H100", 99)
    }


def test_missing_package_and_wrong_use_are_refused(finished, monkeypatch, tmp_path):
    importing = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("plotly"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="plotly")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"plotly.*seqjax\[study\]"):
        page.write(tmp_path / "report.html", files.read(finished), text="")
    with pytest.raises(UserError, match="--analyse=DIR --page"):
        study.main(["--study=figure3d", "--page", f"--out={tmp_path}"])


def opened(path: Path) -> str:
    """Return the page's DOM after its scripts have run, without network."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=8000"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={path.parent / 'browser'}"]
    command = [str(BROWSER), *flags, "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page in")
def test_browser_draws_the_page(html, tmp_path):
    """The scripts draw the pictures as SVG."""
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    drawn = opened(tmp_path / "report.html")
    assert drawn.count('class="scatterlayer') == 4
    assert drawn.count('class="legendtext"') == 1 + 2 + 2 + 2


CLICKS = """<script>
window.addEventListener('load', () => setTimeout(() => {
  const div = document.getElementById('picture1'), seen = {};
  const event = kind => new MouseEvent(kind, {bubbles: true});
  const send = (element, ...kinds) => kinds.forEach(kind => element.dispatchEvent(event(kind)));
  const look = when => { seen[when] = [div.data[0].y, div.data[1].visible, div.data[2].visible] };
  look('before');
  send(div.querySelector('.updatemenu-header'), 'click');
  const buttons = [...div.querySelectorAll('.updatemenu-dropdown-button')];
  send(buttons.find(button => button.textContent == 'github'), 'click');
  send(div.querySelectorAll('.legendtoggle')[1], 'mousedown', 'mouseup');
  // the legend waits for a second click
  setTimeout(() => { look('after'); document.body.setAttribute('data-seen', JSON.stringify(seen)) }, 1500);
}, 500));
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page in")
def test_clicks_switch_domains_and_runs(finished, html, tmp_path):
    clicks = tmp_path / "clicks.html"
    clicks.write_text(html.replace("</body>", CLICKS), encoding="utf-8")
    seen = json.loads(unescape(re.findall('data-seen="([^"]*)"', opened(clicks))[0]))
    (run,) = (run for run in files.read(finished).runs if run.label == "slow")
    losses = {domain: [point.domains[domain] for point in run.points] for domain in ("arxiv", "github")}
    mean = [sum(pair) / 2 for pair in zip(*losses.values(), strict=True)]
    assert seen["before"] == [pytest.approx(mean), True, True]
    assert seen["after"] == [pytest.approx(losses["github"]), "legendonly", "legendonly"], "both seeds"
