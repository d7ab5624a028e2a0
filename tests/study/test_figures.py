"""The study files of the paper's figures: every size of each builds, runs are shared, and one is run as a whole."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from seqjax.config import from_config_dict, presets
from seqjax.data import open_corpus, regimes
from seqjax.data.builtin import corpus as builtin
from seqjax.data.prepare import __main__ as prepare
from seqjax.study import __main__ as study
from seqjax.study import comparison, end_points, figures, forest, records
from seqjax.study.studies import Study, load_study
from seqjax.utils import UserError
from tests import support
from tests.pictures import assert_readable, overlapping
from tests.study.conftest import MODULES
from tests.study.synthetic import write_run, write_study

SIZES = ("demo", "small", "paper")
WITHOUT_SIZE = ("limited_110m", "trunks_110m", "demo_order", "switches", "hybrids", "books_16k", "books_100k")
FIGURES = [name for name in presets.names("studies") if name not in WITHOUT_SIZE]


@functools.cache
def load(text: str) -> Study:
    return load_study(text)


BUILT = [(name, size) for name in presets.names("studies") for size in (("",) if name in WITHOUT_SIZE else SIZES)]


@pytest.mark.parametrize(("name", "size"), support.slow_unless(lambda _, size: size in ("", "paper"), BUILT))
def test_every_size_builds(name, size):
    found = load(f"{name}:{size}" if size else name)
    assert len({run.workdir for run in found.runs}) == len(found.runs) >= 2, "runs in one directory"
    configs = [run.config for run in found.runs if run.config is not None]
    assert len(configs) in (0, len(found.runs))
    whats = {(config.model, config.train, config.optim, config.data) for config in configs}
    assert len(whats) == len(configs), "the same run twice"
    for config in configs:
        known = builtin.REGIMES if config.data.corpus == "builtin" else regimes.REGIMES
        sets = {Path(path).name for path in config.eval.path}
        own = {domain for domain in found.domains if domain.rpartition(".")[0] not in sets}
        assert {*own, *found.against} <= {*(config.data.eval_domains or known[config.data.regime].eval)}
        assert set(found.against) <= {*(config.data.train_domains or known[config.data.regime].train)}


def test_the_figures_of_the_paper_are_there():
    numbers = ("1a", "1b", "2a", "2b", *(f"3{x}" for x in "abcdef"), "4", "6a", "6b", "7", "8", "9")
    assert {f"figure{n}" for n in numbers} | {"rebuttal", "held_out", "mixed_six"} == set(FIGURES)


@pytest.mark.parametrize("size", support.slow_unless(lambda size: size != "small", SIZES))
def test_no_run_is_trained_twice(size):
    """Over all studies of a size, and limited_110m: equal configs have one directory, and a directory one config."""
    runs = [run for name in FIGURES for run in load(f"{name}:{size}").runs] + load("limited_110m").runs
    of_directory, of_config = {}, {}
    for run in runs:
        assert run.config is not None
        # The name is a label; the entropy of figure 4 changes nothing about training.
        what = (run.config.model, run.config.train, run.config.optim, run.config.data, run.config.eval)
        assert of_directory.setdefault(run.workdir, what) == what, run.workdir
        assert of_config.setdefault(what, run.workdir) == run.workdir, run.workdir


def test_small_takes_the_runs_of_limited_110m():
    """With their seeds, rates and schedules where the figure is about these models, and the first seed elsewhere."""
    committed = {run.workdir for run in load("limited_110m").runs}
    replicates = [run for run in load("figure1b:small").runs if run.workdir in committed]
    assert len(replicates) == len(load("figure1b:small").runs) > 30
    assert {run.model for run in replicates} == {run.model for run in load("figure1b:demo").runs} - {"W=32"} | {"W=256"}
    assert {run.workdir for run in load("figure6a:small").runs} <= committed
    of_windows = load("figure3d:small").runs
    assert [run.label for run in of_windows if run.workdir in committed] == ["Transformer++", "W=256"]
    assert all((run.seed, run.rate, run.schedule) == (0, 1, 1) for run in of_windows)


@pytest.mark.parametrize("name", FIGURES)
def test_an_unknown_size_lists_the_sizes(name):
    with pytest.raises(
        UserError, match=r"'smal' is no size of the study\. Did you mean 'small'\? Known: demo, paper, s"
    ):
        load_study(f"{name}:smal")


def test_the_domain_held_out_is_an_argument():
    found = load_study("held_out:small,arxiv")
    assert (found.domains, "arxiv" in found.against, len(found.against)) == (("arxiv",), False, 6)
    assert found.runs[0].config is not None
    assert found.runs[0].config.data.train_domains == tuple(found.against)
    with pytest.raises(UserError, match=r"'arxvi' is no domain\. Did you mean 'arxiv'"):
        load_study("held_out:small,arxvi")


def test_hybrids_have_the_other_mixer_where_they_say():
    runs = {run.model: run.config for run in load("hybrids").runs}
    assert [m.name for m in runs["Mamba-2, attention 1 in 4"].model.mixers] == ["mamba2"] * 3 + ["transformer_pp"]
    assert [m.name for m in runs["Mamba-2, attention 1 in 8"].model.mixers] == ["mamba2"] * 7 + ["transformer_pp"]
    alone, hybrid = runs["Gated DeltaNet"].model, runs["Gated DeltaNet, Top-1 Chunk 1 in 4"].model
    assert hybrid.mixers[:3] == (alone.mixer,) * 3
    assert hybrid.mixers[3] == runs["Top-1 Chunk, exact"].model.mixer
    assert (hybrid.n_layers, hybrid.mlp) == (alone.n_layers, alone.mlp)
    published = runs["Transformer++, QK norm"].model.mixer
    assert runs["Gated DeltaNet, QK norm 1 in 4"].model.mixers[3] == published


def test_the_commands_of_figure_7_make_its_sets(tmp_path, monkeypatch):
    """As its header has them, at T = 62 and with bytes: one block of each document that fills one."""
    words = [f"{i:02d}{'x' * 40}" for i in range(12)]
    texts = {"RedPajamaC4": words, "RedPajamaCommonCrawl": words, "RedPajamaArXiv": words, "RedPajamaGithub": words}
    rows = [{"text": f"{t} {t}"[:n], "meta": {"redpajama_set_name": s}} for s in texts for t in words for n in (59, 70)]
    math = [{"text": f"{t} {t}"[:n]} for t in words for n in (30, 61)]
    held_out = [row for row in rows if row["meta"]["redpajama_set_name"] in ("RedPajamaC4", "RedPajamaCommonCrawl")]
    sources = {"CORPUS/train/a.jsonl": rows, "CORPUS/validation/a.jsonl": held_out}
    sources |= {"AutoMathText/data/web/0.80-1.00.jsonl": math}
    for path, content in sources.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("".join(json.dumps(row) + "\n" for row in content))
    monkeypatch.chdir(tmp_path)
    header = re.search(r'"""(.*?)"""', presets.find("figure7", folder="studies").read_text(), re.S)[1]
    commands = re.findall(r"^ +seqjax prepare (.*)$", header.replace("\\\n", ""), re.M)
    assert len(commands) == 3
    for command in commands:
        command = command.replace("102400", "62").replace("102399", "61").replace("mixtral ", "byte ")
        prepare.main([*shlex.split(command), "--workers=1"])
    found = load("figure7:small")
    config = found.runs[0].config
    assert config is not None
    sets = [path.replace("102400", "62") for path in config.eval.path]
    path = config.data.path.replace("102400", "62")
    data = presets.get_config(
        f"debug,data.corpus=blocks,data.path={path},data.eval_domains=('commoncrawl','c4')",
        name="x",
        mixer={"name": "mamba2"},
    )
    corpus = open_corpus(from_config_dict(data).data, seq_len=62, vocab_size=258, test_sets=sets)
    domains = [domain.replace("102400", "62") for domain in found.domains]
    assert corpus.eval_domains == ("commoncrawl", "c4", *sorted(domains[:2]), domains[2])
    for domain in domains:
        tokens = corpus.eval_blocks(domain, count=10**6).tokens
        assert tokens.shape == (12, 63)
        assert (tokens[:, 0] == tokens[0, 0]).all() and (tokens[:, -1] == tokens[0, -1]).all()


# ----------------------------------------------------------------------------------------------------------- pictures
def entry(root: Path, label: str, *, noise: int, offset: Mapping[str, float] | float = 0.0, **fields) -> dict:
    run = write_run(root / label, [4.0, 3.0, 2.0], noise=noise, offset=offset)
    return {label: {"workdir": str(run), **fields}}


@pytest.mark.slow
def test_seeds_share_a_colour_rates_have_a_picture_of_their_own_and_pictures_are_the_same_bytes_each_time(
    tmp_path, drawn
):
    runs = entry(tmp_path, "slow", noise=0) | entry(tmp_path, "x", noise=1, offset=0.1)
    for i in (1, 2):
        runs |= entry(tmp_path, f"slow, seed {i}", noise=i + 3, model="slow", seed=i)
        runs |= entry(tmp_path, f"x, seed {i}", noise=i + 5, model="x", seed=i)
    runs |= entry(tmp_path, "x, 3", noise=9, model="x", rate=3) | entry(
        tmp_path, "x, 0.5", noise=8, model="x", rate=0.5
    )
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}"])
    for name, figure in drawn.items():
        assert_readable(figure, categories=name == "gaps.png")
    assert [text.get_text() for text in drawn["losses.png"].legends[0].get_texts()] == ["seed 1", "seed 2"]
    _, last, _, last_of_gaps = drawn["losses.png"].axes
    assert [text.get_text() for text in last.texts] == ["slow", "x"], "models are named at their lines, once each"
    assert [text.get_text() for text in last_of_gaps.texts] == ["x"]
    of_x = [line for line in drawn["losses.png"].axes[0].lines if line.get_color() == figures.style(1)["color"]]
    looks = [(line.get_linestyle(), line._unscaled_dash_pattern) for line in of_x if len(line.get_xdata())]
    assert len(looks) == len(set(map(str, looks))) == 3, "a style of its own for each seed, at the common rate"
    gaps = [line for line in drawn["losses.png"].axes[2].lines if line.get_color() == figures.style(1)["color"]]
    assert len(gaps) == 3, "one gap per seed"
    ends = [line for line in drawn["rates.png"].axes[0].lines if line.get_color() == figures.style(1)["color"]]
    assert [len(line.get_xdata()) for line in ends][:4] == [3, 1, 1, 1], "a line and three rates"
    for name in ("rates.png", "cost.png"):
        assert {text.get_text() for text in drawn[name].axes[0].texts} == {"slow", "x"}
    # And the files are the same bytes when they are made again.
    names = sorted(path.name for path in (tmp_path / "out").glob("*.[ps][nv]g"))
    assert names == sorted(f"{name}.{kind}" for name in ("gaps", "losses", "cost", "rates") for kind in ("png", "svg"))
    made = {name: (tmp_path / "out" / name).read_bytes() for name in names}
    study.main([f"--analyse={tmp_path / 'out'}"])
    assert {name: (tmp_path / "out" / name).read_bytes() for name in names} == made
    for name in ("gaps.svg", "losses.svg", "cost.svg", "rates.svg"):
        assert made[name].count(b"<svg ") == 1
        assert b"dc:date" not in made[name]


def test_gaps_at_one_look(tmp_path, drawn):
    """A line per model, best first; the gap at each one's best rate beside it; a reference stands at zero."""
    runs = entry(tmp_path, "slow", noise=0) | entry(tmp_path, "x", noise=1, offset=0.1)
    runs |= {"x, 3": {"workdir": str(write_run(tmp_path / "x, 3", [4.0, 3.0, 1.9], noise=1)), "model": "x", "rate": 3}}
    runs |= entry(tmp_path, "y", noise=2, offset=-0.2)
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}"])
    (panel,) = drawn["gaps.png"].axes
    assert [text.get_text() for text in panel.get_yticklabels()] == ["y", "slow", "x"]
    lines = [line for line in panel.lines[1:] if len(line.get_xdata())]  # without the legend's
    found = {tuple(np.round([*line.get_xdata(), *line.get_ydata()], 4)): line.get_marker() for line in lines}
    assert found == {(-0.2, 0): "o", (0.1, 2): "o", (0.0, 2 + forest.OFFSETS[forest.BEST_RATE]): "D"}


def test_seventeen_models_look_different():
    looks = [str(sorted(figures.style(i).items())) for i in range(28)]
    assert len(set(looks)) == 28


def test_many_domains_are_drawn_as_their_mean(tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(figures, "COLUMNS", 1)
    runs = entry(tmp_path, "slow", noise=0) | entry(tmp_path, "x", noise=1, offset={"arxiv": 0.1, "github": 0.3})
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}"])
    figure = drawn["losses.png"]
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["mean of 2 domains, each the same", ""]
    assert figure.axes[0].lines[1].get_ydata() == pytest.approx([3.2], abs=1e-5)


def test_some_models_are_drawn_as_they_are_among_all(tmp_path, undrawn_pictures, monkeypatch):
    """With the references, in their colours; one that the study has not is refused."""
    runs = entry(tmp_path, "slow", noise=0) | entry(tmp_path, "x", noise=1, offset=0.1)
    runs |= entry(tmp_path, "y", noise=2, offset=-0.2)
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}"])
    found = records.read(tmp_path / "out")
    composed = []
    monkeypatch.setattr(figures, "save", lambda figure, path: composed.append(figure))
    for chosen, models in ((None, (0, 1, 2)), (["y"], (0, 2))):
        figures.against_loss_in_domain(tmp_path / "losses.png", found, models=chosen)
        lines = [line for line in composed[-1].axes[0].lines if len(line.get_xdata())]  # without the legend's
        assert [line.get_color() for line in lines] == [figures.style(i)["color"] for i in models]
    assert [text.get_text() for text in composed[-1].axes[1].texts] == ["slow", "y"]
    with pytest.raises(UserError, match=r"The study has no model 'z'\. Its models: slow; x; y\."):
        figures.against_loss_in_domain(tmp_path / "losses.png", found, models=["z"])


@pytest.mark.slow
def test_many_models_have_a_panel_each(tmp_path, drawn, monkeypatch):
    """Named and in its colour, the others grey, with the gap below; the first evaluation that is drawn is not cut."""
    monkeypatch.setattr(figures, "TOGETHER", 2)
    runs = entry(tmp_path, "slow", noise=0)
    for i, name in enumerate(("a", "b", "c", "d", "e", "f")):
        runs |= {name: {"workdir": str(write_run(tmp_path / name, [2.6 + i / 20, 2.3, 2.0], noise=i, offset=i / 10))}}
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}"])
    figure = drawn["losses.png"]
    assert_readable(figure)
    panels = [panel for panel in figure.axes if panel.axison]
    assert [panel.get_title(loc="left") for panel in panels] == list(runs) * 2, "the losses, and the gaps to slow"
    for i, panel in enumerate(panels):
        own = [line for line in panel.lines if line.get_color() == figures.style(i % len(runs))["color"]]
        assert len(own) == int(i != len(runs)), "one line of its own, but for the reference's gap to itself"
        assert sum(line.get_color() == "0.85" for line in panel.lines) == 1, "a path of all others"
        low, high = sorted(panel.get_xlim())
        for line in panel.lines:
            x = np.asarray(line.get_xdata(), float)
            if line.get_transform() == panel.transData and len(x):
                assert low < np.nanmin(x) and np.nanmax(x) < high
    assert figure.get_suptitle().endswith("grey: the other models")


def test_runs_of_one_evaluation_are_points_that_share_panels(tmp_path, drawn):
    """However many models there are, and a panel for each domain, with the names at the points."""
    losses = {f"model {i}": 2.0 + i / 10 for i in range(figures.TOGETHER + 1)}
    runs = {}
    for i, (name, loss) in enumerate(losses.items()):
        run = write_run(tmp_path / name, [loss], noise=i, offset={"arxiv": i, "github": -i})
        runs |= {name: {"workdir": str(run)}}
    path = write_study(tmp_path / "study.py", runs, references=["model 0"])
    study.main([f"--study={path}", f"--out={tmp_path / 'out'}"])
    assert_readable(drawn["losses.png"])
    arxiv, github = drawn["losses.png"].axes
    for panel, sign in ((arxiv, 1), (github, -1)):
        assert [text.get_text() for text in panel.texts] == list(losses)
        assert overlapping(panel.texts) == []
        points = [line for line in panel.lines if line.get_marker() not in ("", "None")]
        for i, (line, loss) in enumerate(zip(points, losses.values(), strict=True)):
            assert line.get_xydata() == pytest.approx(np.array([[loss, loss + 1 + sign * i]]), abs=1e-5)


@pytest.mark.parametrize(
    "name",
    support.slow_unless(
        lambda name: name == "figure4",
        ["books_100k", "trunks_110m", "figure4", "hybrids", "switches", "limited_110m", "first_110m"],
    ),
)
def test_the_pictures_of_the_committed_studies_can_be_read(name, monkeypatch):
    found = records.read(support.ROOT / "docs" / "results" / name)
    composed = {}
    for module in MODULES:
        monkeypatch.setattr(module, "save", lambda figure, path: composed.update({path: figure}))
    figures.against_loss_in_domain("losses", found)
    end_points.gap_over_speed("cost", found)
    if name != "books_100k":  # its runs have no losses in common
        forest.gaps("gaps", found)
    if name not in ("first_110m", "books_100k"):
        end_points.by_rate("rates", found)
    if name == "figure4":
        end_points.over_setting("sweep", found)
    models = comparison.models(found)
    for what, figure in composed.items():
        assert_readable(figure, categories=what == "gaps")
        for panel in figure.axes:
            assert overlapping(panel.texts) == [], what
    titles = [panel.get_title(loc="left") for panel in composed["losses"].axes]
    labels = {text.get_text() for panel in composed["losses"].axes for text in panel.texts}
    assert {*models} <= {*titles, *labels}
    if "rates" in composed:
        assert {text.get_text() for text in composed["rates"].axes[0].texts} == {*models}
    speeds, gaps = end_points.run_speeds(found), end_points.gaps_to(found, found.references[0])
    assert {text.get_text() for text in composed["cost"].axes[0].texts} == speeds.keys() & gaps.keys()
    of_cost = composed["cost"].axes[0]
    assert "(tokens/s)" in of_cost.get_xlabel() and "(nats per token)" in of_cost.get_ylabel()


def test_entropy_and_gap_over_the_setting_that_varies(tmp_path, drawn):
    """The entropy is that of the end of each run; models without a number there are left out."""
    runs = entry(tmp_path, "slow", noise=0)
    for i, value in enumerate((4.0, 0.25, None)):
        name = f"temperature {value}"
        runs |= entry(tmp_path, name, noise=i + 1, offset=0.1 * (value or 9))
        config = {"data": {"tokenizer": "byte"}, "model": {"mixer": {"temperature": value}}}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for domain in ("commoncrawl", "c4", "arxiv", "github"):
            spread = {"entropy": (value or 9) + 1, "entropy_relative": 0.5}
            rows[-1] |= {f"eval/{domain}/{field}": number for field, number in spread.items()}
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    path = write_study(tmp_path / "study.py", runs, sweep="model.mixer.temperature")
    study.main([f"--study={path}", f"--out={tmp_path / 'out'}"])
    assert (tmp_path / "out" / "sweep.svg").is_file()
    gaps, entropies = drawn["sweep.png"].axes
    lines = [line for line in gaps.lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in lines] == [[0.25, 4.0]] * 2
    assert lines[0].get_ydata() == pytest.approx([0.025, 0.4], abs=1e-5)
    assert [list(line.get_ydata()) for line in entropies.lines] == [[1.25, 5.0]] * 4
    assert "| temperature 4.0 | 5.000 (0.500) |" in (tmp_path / "out" / "gaps.md").read_text()


# ------------------------------------------------------------------------------------------------------- a whole study
@pytest.mark.slow
def test_a_figure_from_nothing_to_its_pictures(tmp_path):
    """Three runs of two temperatures and a reference of figures 1(b), 3(f) and 4, through the commands themselves."""
    command = [sys.executable, "-m", "seqjax.study", "--study=figure4:demo"]
    environment = os.environ | {"PYTHONPATH": str(support.ROOT)}

    def run(*more: str) -> str:
        words = [*command, *more]
        return subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment).stdout

    for label in ("Transformer++", "temperature 4", "temperature 0.25"):
        run(f"--only={label}")
    assert run("--list").count(" complete ") == 3
    run("--partial", f"--out={tmp_path / 'out'}")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {f"{name}.{kind}" for name in ("gaps", "losses", "cost", "sweep") for kind in ("png", "svg")}
    data = {"points.csv", "blocks.npz", "classes.npz", "metrics.npz", "runs.json"}
    assert files == {"gaps.md", *data, *pictures}
    found = records.read(tmp_path / "out")
    entropy = {
        model: end_points.entropy_of(comparison.common_runs(found, model)) for model in end_points.values_of(found)
    }
    assert set(entropy) == {"temperature 4", "temperature 0.25"}
    for domain in ("prose", "doctest", "math_docs", "python", "c_code"):
        assert 0 < entropy["temperature 0.25"][domain] < entropy["temperature 4"][domain]
    rows = comparison.compare(found, "Transformer++")
    assert all(row.lowest is not None for row in rows)
    # Figure 1(b) finds its reference trained.
    done = subprocess.run(
        [*command[:-1], "--study=figure1b:demo", "--list"],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.stdout.count(" complete ") == 1
