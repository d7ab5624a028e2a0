"""Public functions accept str and Path, and all libraries use the same directory."""

import json
import shutil
from pathlib import Path

import pytest

from seqjax import convert, presets
from seqjax.data import open_corpus, prepare
from seqjax.errors import UserError
from seqjax.study.report.results import analyse
from seqjax.study.runs.collect import read_points
from seqjax.study.runs.studies import load_study
from seqjax.training import eval_losses, evaluate, metrics
from seqjax.training import workdir as workdirs
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.loop import train
from tests import support
from tests.convert.cases import GOLDEN, config_of
from tests.data.conftest import prepared, write_corpus

ROW = {"step": 1, "tokens": 8, "train/loss": 2.0, "eval/c4/loss": 3.0}


@pytest.mark.parametrize("kind", [str, Path])
def test_workdir_accepts_str_and_path(kind, blocks_dir, tmp_path):
    config = support.run_config(blocks_dir, "transformer_pp")
    workdir = kind(tmp_path / "run")
    workdirs.save_config(workdir, config)
    assert workdirs.load_config(workdir) == config
    model = evaluate.Model(config.model, max_len=config.train.seq_len)
    checkpoints = Checkpoints(workdir)
    checkpoints.save_params(3, support.random_params(model))
    checkpoints.wait()
    checkpoints.close()
    restored, _, _, step, _ = evaluate.restore(workdir)
    assert (restored, step) == (config, 3)
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    assert metrics.read(workdir) == [ROW]
    assert eval_losses.read(workdir) == ({}, {})
    points = read_points(workdir)
    assert points[0].domains == {"c4": 3.0}


ODD = (
    "a b", " a ", "~a", "a:b", "gs:x", "data:,x", "{x}", "a%20#$HOME", "\t\x07", "\N{RIGHT-TO-LEFT OVERRIDE}",
    "\N{LATIN SMALL LETTER E WITH ACUTE}", "'\"", "-a=b,c", "n" * 255,
)  # fmt: skip


@pytest.mark.parametrize("name", ODD, ids=ascii)
def test_odd_directory_names_work_in_all_libraries(name, blocks_dir, tmp_path, monkeypatch):
    """All libraries use this directory and create no other."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "source" / name, documents=2, shards=1)
    prepare.prepare(f"source/{name}", f"./{name}", tokenizer="byte", seq_len=16, workers=1)
    config = support.run_config(blocks_dir, "transformer_pp", data__path=f"./{name}", train__seq_len=16)
    corpus = open_corpus(config.data, seq_len=16, vocab_size=config.model.vocab_size)
    assert corpus.train_iterator(batch_size=1, process_index=0, process_count=1)
    workdirs.save_config(f"./{name}", config)
    model = evaluate.Model(config.model, max_len=16)
    checkpoints = Checkpoints(f"./{name}")
    checkpoints.save_params(3, support.random_params(model))
    checkpoints.wait()
    checkpoints.close()
    assert evaluate.restore(f"./{name}")[3] == 3
    assert (tmp_path / name / "checkpoints" / "3").is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {name, "source"}


@pytest.mark.parametrize("name", ["a\\b", "a::b", "a\nb", "[a]", "a*", "a?"])
def test_ambiguous_directory_names_are_refused(name, blocks_dir, tmp_path, monkeypatch):
    """No run may be in such a directory or below it."""
    (tmp_path / name).mkdir()
    config = support.run_config(blocks_dir, "transformer_pp")
    for workdir in (tmp_path / name, str(tmp_path / name / "run"), tmp_path / name / ".." / name):
        with pytest.raises(UserError, match=r"rename"):
            train(config, workdir)
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(UserError, match=r"rename"):
        train(config, "run")
    assert not list((tmp_path / name).iterdir())


@pytest.mark.parametrize("kind", [str, Path])
def test_configs_and_studies_accept_str_and_path(kind):
    path = support.ROOT / "configs" / "transformer_pp.py"
    assert presets.find(kind(path)) == path
    assert presets.load_file(kind(path)).get_config("debug").name == "transformer_pp"
    assert load_study(kind(support.ROOT / "configs" / "studies" / "limited_110m.py")).references == (
        "Transformer++",
        "Transformer++, QK norm",
    )


@pytest.mark.parametrize("kind", [str, Path])
def test_prepare_accepts_str_and_path(kind, tmp_path):
    write_corpus(tmp_path / "source", documents=2, shards=1)
    source, out = kind(tmp_path / "source"), kind(tmp_path / "out")
    made = prepare.prepare(source, out, tokenizer="byte", seq_len=16, workers=1)
    assert made == prepared(tmp_path / "source", tmp_path / "same")


@pytest.mark.parametrize("kind", [str, Path])
def test_convert_accepts_str_and_path(kind, tmp_path):
    config = config_of("llama")
    weights = convert.import_weights(kind(GOLDEN / "llama"), config)
    convert.export_weights(weights, config, kind(tmp_path / "out" / "model.safetensors"))
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("kind", [pytest.param(str, marks=pytest.mark.slow), Path])
def test_analyse_accepts_str_and_path(kind, tmp_path):
    shutil.copytree(support.ROOT / "tests" / "golden" / "studies" / "sweep", tmp_path / "study")
    analyse(kind(tmp_path / "study"))
