"""report.html and the picture of gap against speed: what they hold, and that they need nothing else."""

import builtins
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from seqjax.study import __main__ as study
from seqjax.study import end_points, records
from seqjax.utils import UserError
from tests import support
from tests.study.synthetic import write_run, write_study

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


def traces(html: str) -> list[list[dict]]:
    """The traces of every picture, as plotly is given them."""
    found = re.findall(r'Plotly\.newPlot\(\s*"picture\d",\s*(\[.*?\]),\s*\{"template"', html, flags=re.DOTALL)
    return [json.loads(text) for text in found]


def test_the_page_has_every_run_and_every_table_and_needs_nothing_else(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "out")
    study.main([f"--analyse={out}", "--page"])
    html = (out / "report.html").read_text()
    pictures = traces(html)
    assert [[trace["name"] for trace in picture] for picture in pictures] == [
        ["slow", "fast", "fast, seed 1"],
        ["slow", "fast", "fast, seed 1"],
        ["slow", "fast"],
    ]
    losses = pictures[0][1]
    assert losses["x"] == pytest.approx([5.1, 4.1, 3.1], abs=1e-5)
    assert losses["y"] == pytest.approx([6.35, 5.35, 4.35], abs=1e-5)
    assert "arxiv 6.350" in losses["text"][0]
    assert [trace.get("visible") for trace in pictures[0]] == [True, True, "legendonly"]
    assert pictures[2][1]["y"] == pytest.approx([0.25], abs=1e-5)
    for line in (finished / "gaps.md").read_text().splitlines():
        for cell in re.findall(r"(?<=\| )[^|]+(?= \|)", line) if line.startswith("| ") else ():
            assert cell.strip("-: ") == "" or f">{cell}</t" in html, cell
    assert "<h1>a &lt; b &amp; c</h1>" in html
    assert not re.search(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="', html), "something is fetched"
    again = (out / "report.html").read_bytes()
    study.main([f"--analyse={out}", "--page"])
    assert (out / "report.html").read_bytes() == again


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


def opened(page: Path) -> str:
    """The page as a browser leaves it once its scripts have run."""
    flags = ["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=8000"]
    command = [str(BROWSER), *flags, "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page in")
def test_a_browser_draws_it(finished, tmp_path):
    """Without network; the pictures are drawn by scripts, so the page that is left holds them as SVG."""
    out = shutil.copytree(finished, tmp_path / "out")
    study.main([f"--analyse={out}", "--page"])
    drawn = opened(out / "report.html")
    assert drawn.count('class="scatterlayer') == 3
    assert drawn.count('class="legendtext"') == 3 + 3 + 2


CLICKS = """<script>
window.addEventListener('load', () => setTimeout(() => {
  const div = document.getElementById('picture0'), seen = {};
  const event = kind => new MouseEvent(kind, {bubbles: true});
  const send = (element, ...kinds) => kinds.forEach(kind => element.dispatchEvent(event(kind)));
  const look = when => { seen[when] = [div.data[0].y, div.data[1].visible] };
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
    page = tmp_path / "clicks.html"
    page.write_text((out / "report.html").read_text(encoding="utf-8").replace("</body>", CLICKS), encoding="utf-8")
    seen = json.loads(unescape(re.findall('data-seen="([^"]*)"', opened(page))[0]))
    (run,) = (run for run in records.read(out).runs if run.label == "slow")
    of_domain = {domain: [point.domains[domain] for point in run.points] for domain in ("arxiv", "github")}
    mean = [sum(both) / 2 for both in zip(*of_domain.values(), strict=True)]
    assert seen["before"] == [pytest.approx(mean), True]
    assert seen["after"] == [pytest.approx(of_domain["github"]), "legendonly"]
