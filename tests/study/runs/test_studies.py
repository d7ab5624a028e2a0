"""Shipped study files: every size builds, runs are shared, one runs end to end."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from seqjax.config import from_config_dict, presets
from seqjax.data import open_corpus, regimes
from seqjax.data.builtin import corpus as builtin
from seqjax.data.prepare import __main__ as prepare
from seqjax.errors import UserError
from seqjax.study import gaps
from seqjax.study.report import points
from seqjax.study.runs import files
from seqjax.study.runs.studies import Study, load_study
from tests import support

SIZES = ("demo", "small", "paper")
WITHOUT_SIZE = ("limited_110m", "trunks_110m", "demo_order", "switches", "hybrids", "books_16k", "books_100k")
MAP_SIZES = ("128x4", "256x6", "512x8", "768x12")  # of size_map
FIGURES = [name for name in presets.names("studies") if name not in (*WITHOUT_SIZE, "size_map")]


@functools.cache
def load(text: str) -> Study:
    return load_study(text)


BUILT = [(name, size) for name in FIGURES for size in SIZES]
BUILT += [(name, "") for name in WITHOUT_SIZE] + [("size_map", size) for size in MAP_SIZES]


@pytest.mark.parametrize(("name", "size"), support.slow_unless(lambda _, size: size in ("", "paper", "256x6"), BUILT))
def test_every_size_builds(name, size):
    study = load(f"{name}:{size}" if size else name)
    assert len({run.workdir for run in study.runs}) == len(study.runs) >= 2, "runs in one directory"
    configs = [run.config for run in study.runs if run.config is not None]
    assert len(configs) in (0, len(study.runs))
    identities = {(config.model, config.train, config.optim, config.data) for config in configs}
    assert len(identities) == len(configs), "the same run twice"
    for config in configs:
        known = builtin.REGIMES if config.data.corpus == "builtin" else regimes.REGIMES
        sets = {Path(path).name for path in config.eval.path}
        regime_domains = {domain for domain in study.domains if domain.rpartition(".")[0] not in sets}
        assert {*regime_domains, *study.against} <= {*(config.data.eval_domains or known[config.data.regime].eval)}
        assert set(study.against) <= {*(config.data.train_domains or known[config.data.regime].train)}


def test_all_paper_figures_have_a_study():
    numbers = ("1a", "1b", "2a", "2b", *(f"3{x}" for x in "abcdef"), "4", "6a", "6b", "7", "8", "9")
    assert {f"figure{n}" for n in numbers} | {"rebuttal", "held_out", "mixed_six"} == set(FIGURES)


@pytest.mark.parametrize("size", support.slow_unless(lambda size: size != "small", SIZES))
def test_no_run_is_trained_twice(size):
    """Equal configs share one directory, over all studies of a size and limited_110m."""
    runs = [run for name in FIGURES for run in load(f"{name}:{size}").runs] + load("limited_110m").runs
    settings_by_workdir, workdir_by_settings = {}, {}
    for run in runs:
        assert run.config is not None
        # The name is a label, and figure 4's entropy does not affect training.
        settings = (run.config.model, run.config.train, run.config.optim, run.config.data, run.config.eval)
        assert settings_by_workdir.setdefault(run.workdir, settings) == settings, run.workdir
        assert workdir_by_settings.setdefault(settings, run.workdir) == run.workdir, run.workdir


def test_small_reuses_limited_110m_runs():
    """Figures about these models use all their runs, other figures the first seed."""
    committed = {run.workdir for run in load("limited_110m").runs}
    replicates = [run for run in load("figure1b:small").runs if run.workdir in committed]
    assert len(replicates) == len(load("figure1b:small").runs) > 30
    assert {run.model for run in replicates} == {run.model for run in load("figure1b:demo").runs} - {"W=32"} | {"W=256"}
    assert {run.workdir for run in load("figure6a:small").runs} <= committed
    window_runs = load("figure3d:small").runs
    assert [run.label for run in window_runs if run.workdir in committed] == ["Transformer++", "W=256"]
    assert all((run.seed, run.rate, run.schedule) == (0, 1, 1) for run in window_runs)


@pytest.mark.parametrize("name", FIGURES)
def test_unknown_size_lists_the_sizes(name):
    with pytest.raises(UserError, match=r"'smal'.* 'small'.* demo, paper, s"):
        load_study(f"{name}:smal")


def test_held_out_domain_is_an_argument():
    study = load_study("held_out:small,arxiv")
    assert (study.domains, "arxiv" in study.against, len(study.against)) == (("arxiv",), False, 6)
    assert study.runs[0].config is not None
    assert study.runs[0].config.data.train_domains == tuple(study.against)
    with pytest.raises(UserError, match=r"'arxvi'.* 'arxiv'"):
        load_study("held_out:small,arxvi")


def test_hybrids_place_the_second_mixer():
    runs = {run.model: run.config for run in load("hybrids").runs}
    assert [m.name for m in runs["Mamba-2, attention 1 in 4"].model.mixers] == ["mamba2"] * 3 + ["transformer_pp"]
    assert [m.name for m in runs["Mamba-2, attention 1 in 8"].model.mixers] == ["mamba2"] * 7 + ["transformer_pp"]
    recurrent, hybrid = runs["Gated DeltaNet"].model, runs["Gated DeltaNet, Top-1 Chunk 1 in 4"].model
    assert hybrid.mixers[:3] == (recurrent.mixer,) * 3
    assert hybrid.mixers[3] == runs["Top-1 Chunk, exact"].model.mixer
    assert (hybrid.n_layers, hybrid.mlp) == (recurrent.n_layers, recurrent.mlp)
    published = runs["Transformer++, QK norm"].model.mixer
    assert runs["Gated DeltaNet, QK norm 1 in 4"].model.mixers[3] == published


def test_figure_7_commands_prepare_its_test_sets(tmp_path, monkeypatch):
    """Run the header's commands with T = 62 and bytes; each long document gives one block."""
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
    study = load("figure7:small")
    config = study.runs[0].config
    assert config is not None
    sets = [path.replace("102400", "62") for path in config.eval.path]
    path = config.data.path.replace("102400", "62")
    data = presets.get_config(
        f"debug,data.corpus=blocks,data.path={path},data.eval_domains=('commoncrawl','c4')",
        name="x",
        mixer={"name": "mamba2"},
    )
    corpus = open_corpus(from_config_dict(data).data, seq_len=62, vocab_size=258, test_sets=sets)
    domains = [domain.replace("102400", "62") for domain in study.domains]
    assert corpus.eval_domains == ("commoncrawl", "c4", *sorted(domains[:2]), domains[2])
    for domain in domains:
        tokens = corpus.eval_blocks(domain, count=10**6).tokens
        assert tokens.shape == (12, 63)
        assert (tokens[:, 0] == tokens[0, 0]).all() and (tokens[:, -1] == tokens[0, -1]).all()


# ------------------------------------------------------------------------------------------------------- a full study
@pytest.mark.slow
def test_figure_end_to_end(tmp_path):
    """Train two temperatures and a reference, shared by figures 1(b), 3(f) and 4."""
    command = [sys.executable, "-m", "seqjax.study", "--study=figure4:demo"]
    environment = os.environ | {"PYTHONPATH": str(support.ROOT)}

    def run(*more: str) -> str:
        words = [*command, *more]
        return subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment).stdout

    for label in ("Transformer++", "temperature 4", "temperature 0.25"):
        run(f"--only={label}")
    assert run("--list").count(" complete ") == 3
    run("--partial", f"--out={tmp_path / 'out'}")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {f"{name}.{kind}" for name in ("gaps", "losses", "cost", "sweep") for kind in ("png", "svg")}
    data = {"points.csv", "blocks.npz", "classes.npz", "metrics.npz", "runs.json"}
    assert names == {"leaderboard.md", "leaderboard.csv", "classes.md", *data, *pictures}
    study_records = files.read(tmp_path / "out")
    entropy = {
        model: points.attention_entropy(gaps.shown_runs(study_records, model))
        for model in points.setting_values(study_records)
    }
    assert set(entropy) == {"temperature 4", "temperature 0.25"}
    for domain in ("prose", "doctest", "math_docs", "python", "c_code"):
        assert 0 < entropy["temperature 0.25"][domain] < entropy["temperature 4"][domain]
    rows = gaps.compare(study_records, "Transformer++")
    assert len(rows) == 2 and all(row.at_equal_tokens is not None for row in rows)
    # Figure 1(b) shares the trained reference.
    done = subprocess.run(
        [*command[:-1], "--study=figure1b:demo", "--list"],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.stdout.count(" complete ") == 1
