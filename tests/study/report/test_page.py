"""report.html and the picture of gap against speed: what they hold, and that they need nothing else."""

import builtins
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from seqjax.study.verdict import in_words

from seqjax.study import __main__ as study
from seqjax.study import end_points, forest, page, records
from seqjax.utils import UserError
from tests import support
from tests.study.synthetic import write_run, write_study

# after `finished`, whose pictures are drawn
pytestmark = pytest.mark.usefixtures("undrawn_pictures")
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The results of a study of two models; one has a second seed and a config."""
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
    speeds = {"tokens/s at T = 99": {"fast": 123.0, "slow": 7.0}}
    path = write_study(root / "study.py", runs, title="a < b & c", speeds=speeds)
    study.main([f"--study={path}", f"--out={root / 'out'}", "--partial"])
    return root / "out"


def pictures_of(html: str) -> list[tuple[list[dict], dict]]:
    """The traces and the layout of every picture, as plotly is given them."""
    found, decode = [], json.JSONDecoder().raw_decode
    for start in re.finditer(r'Plotly\.newPlot\(\s*"picture\d",\s*', html):
        traces, end = decode(html, start.end())
        layout, _ = decode(html, html.index("{", end))
        found.append((traces, layout))
    return found


def test_the_page_has_every_run_and_every_table_and_needs_nothing_else(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "out")
    study.main([f"--analyse={out}", "--page"])
    html = (out / "report.html").read_text()
    pictures = [traces for traces, _ in pictures_of(html)]
    assert [[trace["name"] for trace in picture] for picture in pictures] == [
        [forest.ONE_SEED],
        ["slow", "fast", "fast"],
        ["slow", "fast", "fast"],
        ["slow", "fast"],
    ]
    assert pictures[0][0]["x"] == pytest.approx([0.25], abs=1e-5)
    losses = pictures[1][1]
    assert losses["x"] == pytest.approx([5.1, 4.1, 3.1], abs=1e-5)
    assert losses["y"] == pytest.approx([6.35, 5.35, 4.35], abs=1e-5)
    assert "arxiv 6.350" in losses["text"][0]
    assert pictures[3][1]["y"] == pytest.approx([0.25], abs=1e-5)
    for line in (finished / "gaps.md").read_text().splitlines():
        for cell in re.findall(r"(?<=\| )[^|]+(?= \|)", line) if line.startswith("| ") else ():
            assert cell.strip("-: ") == "" or f">{cell}</t" in html, cell
    assert "<h1>a &lt; b &amp; c</h1>" in html
    assert not re.search(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="', html), "something is fetched"
    again = (out / "report.html").read_bytes()
    study.main([f"--analyse={out}", "--page"])
    assert (out / "report.html").read_bytes() == again


def test_the_page_begins_with_the_verdicts_and_the_gaps(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "out")
    study.main([f"--analyse={out}", "--page"])
    html = (out / "report.html").read_text()
    headings = [unescape(text) for text in re.findall(r"<h[123]>(.*?)</h[123]>", html)]
    first = ["a < b & c", "Verdicts", "Against slow", "Gaps", "Loss out of domain over loss in domain"]
    assert headings[: len(first)] == first
    assert headings.index("Gap over training speed") < headings.index("Runs") < headings.index("Gaps to slow")
    ((words, models),) = in_words(records.read(out), "slow").items()
    assert words.startswith("Yes, it costs in these two runs.") and models[0].startswith("fast (+0.250 ± ")
    assert f"<li><b>{words}</b> <span>{models[0]}</span></li>" in html


def test_axes_have_units_and_room_for_the_first_points(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "out")
    study.main([f"--analyse={out}", "--page"])
    pictures = pictures_of((out / "report.html").read_text())
    for traces, layout in pictures:
        of_models = traces is pictures[0][0]
        for name, axis in layout.items():
            if re.fullmatch(r"xaxis\d*" if of_models else r"[xy]axis", name):
                assert re.search(r"\((nats per token|millions|tokens/s)\)$", axis["title"]["text"])
            if name in ("xaxis", "yaxis") and "range" in axis and not of_models:
                low, high = sorted(axis["range"])
                values = [value for trace in traces for value in trace[name[0]]]
                assert low < min(values) and max(values) < high, f"{name} cuts points"
    for _, layout in pictures[1:3]:  # and each domain of the menu has the range of its own values
        for button in layout["updatemenus"][0]["buttons"]:
            data, axes = button["args"]
            low, high = axes["yaxis.range"]
            assert all(low < value < high for y in data["y"] for value in y), button["label"]
    assert pictures[1][1]["xaxis"]["range"][0] > 5.2, "training goes from left to right, and begins at 5.2"


def test_runs_of_a_model_are_switched_together(tmp_path):
    """All seeds in one entry of the legend, and those at other rates or schedules in another, which is off at first."""
    runs = {}
    for seed in range(3):
        for name in ("slow", "x"):
            run = write_run(tmp_path / f"{name}{seed}", [4.0, 3.0, 2.0], noise=seed, offset=0.1 * (name == "x"))
            runs[f"{name}, seed {seed}"] = {"workdir": str(run), "model": name, "seed": seed}
    for label, fields in {"x, 3": {"rate": 3}, "x, 9": {"rate": 9}, "slow, half": {"schedule": 0.5}}.items():
        run = write_run(tmp_path / label, [4.0, 3.0, 2.2], noise=7)
        runs[label] = {"workdir": str(run), "model": label.split(",")[0], **fields}
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}", "--partial"])
    study.main([f"--analyse={tmp_path / 'out'}", "--page"])
    html = (tmp_path / "out" / "report.html").read_text()
    expected = {"slow": (3, True), "x": (3, True), "slow, other schedules": (1, "legendonly")}
    expected |= {"x, other rates": (2, "legendonly")}
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
    assert html.count(page.CLICKS) == html.count(page.OTHERS) == 1


def test_cost_stands_beside_the_gap(finished):
    """Parameters, FLOPs and state are those of the config: Mamba-2's is a state and the convolution's last inputs."""
    found = records.read(finished)
    (fast,) = (run for run in found.runs if run.label == "fast")
    inner = 2 * 64  # the run was on a CPU, where the state is float32
    assert fast.metadata["state_bytes"] == 4 * 4 * (inner * 128 + 3 * (inner + 2 * 128))
    header, _, slow, row = (line for line in (finished / "gaps.md").read_text().split("## Cost")[1].splitlines()[4:8])
    assert "| tokens/s at T = 99 | memory | state | GFLOPs/token | gap to slow |" in header
    assert row.startswith("| fast | 5 | 123 | - | 0.3 MiB | 0.002 | +0.2")
    assert slow == "| slow | 5 | 7 | - | - | - | - |"
    assert end_points.run_speeds(found) == {"slow": 5.0, "fast": 5.0}
    assert (finished / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_package_and_a_wrong_use_are_named(finished, monkeypatch, tmp_path):
    importing = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("plotly"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="plotly")
        return importing(name, *args, **kwargs)

    out = shutil.copytree(finished, tmp_path / "out")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"needs the package plotly.*seqjax\[study\]"):
        study.main([f"--analyse={out}", "--page"])
    with pytest.raises(UserError, match="--analyse=DIR --page"):
        study.main(["--study=figure3d", "--page", f"--out={tmp_path}"])


def opened(path: Path) -> str:
    """The page as a browser leaves it once its scripts have run."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=8000"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={path.parent / 'browser'}"]
    command = [str(BROWSER), *flags, "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page in")
def test_a_browser_draws_it(finished, tmp_path):
    """Without network; the pictures are drawn by scripts, so the page that is left holds them as SVG."""
    out = shutil.copytree(finished, tmp_path / "out")
    study.main([f"--analyse={out}", "--page"])
    drawn = opened(out / "report.html")
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
def test_domains_and_runs_are_switched_by_clicks(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "out")
    study.main([f"--analyse={out}", "--page"])
    clicks = tmp_path / "clicks.html"
    clicks.write_text((out / "report.html").read_text(encoding="utf-8").replace("</body>", CLICKS), encoding="utf-8")
    seen = json.loads(unescape(re.findall('data-seen="([^"]*)"', opened(clicks))[0]))
    (run,) = (run for run in records.read(out).runs if run.label == "slow")
    of_domain = {domain: [point.domains[domain] for point in run.points] for domain in ("arxiv", "github")}
    mean = [sum(both) / 2 for both in zip(*of_domain.values(), strict=True)]
    assert seen["before"] == [pytest.approx(mean), True, True]
    assert seen["after"] == [pytest.approx(of_domain["github"]), "legendonly", "legendonly"], "both seeds"
