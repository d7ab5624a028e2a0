"""Public functions that take a path take a str as well as a Path, and mean the same."""

import json
import shutil
from pathlib import Path

import pytest

from seqjax import convert, presets
from seqjax.data import prepare
from seqjax.study.report.results import analyse
from seqjax.study.runs.collect import read_points
from seqjax.study.runs.studies import load_study
from seqjax.training import eval_losses, evaluate, metrics
from seqjax.training import workdir as workdirs
from seqjax.training.checkpoint import Checkpoints
from tests import support
from tests.convert.cases import GOLDEN, config_of
from tests.data.conftest import prepared, write_corpus

ROW = {"step": 1, "tokens": 8, "train/loss": 2.0, "eval/c4/loss": 3.0}


@pytest.mark.parametrize("kind", [str, Path])
def test_a_workdir(kind, blocks_dir, tmp_path):
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


@pytest.mark.parametrize("kind", [str, Path])
def test_configs_and_studies(kind):
    path = support.ROOT / "configs" / "transformer_pp.py"
    assert presets.find(kind(path)) == path
    assert presets.load_file(kind(path)).get_config("debug").name == "transformer_pp"
    assert load_study(kind(support.ROOT / "configs" / "studies" / "limited_110m.py")).references == (
        "Transformer++",
        "Transformer++, QK norm",
    )


@pytest.mark.parametrize("kind", [str, Path])
def test_data(kind, tmp_path):
    write_corpus(tmp_path / "source", documents=2, shards=1)
    source, out = kind(tmp_path / "source"), kind(tmp_path / "out")
    made = prepare.prepare(source, out, tokenizer="byte", seq_len=16, workers=1)
    assert made == prepared(tmp_path / "source", tmp_path / "same")


@pytest.mark.parametrize("kind", [str, Path])
def test_weights(kind, tmp_path):
    config = config_of("llama")
    weights = convert.import_weights(kind(GOLDEN / "llama"), config)
    convert.export_weights(weights, config, kind(tmp_path / "out" / "model.safetensors"))
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("kind", [pytest.param(str, marks=pytest.mark.slow), Path])
def test_a_finished_study(kind, tmp_path):
    shutil.copytree(support.ROOT / "tests" / "golden" / "studies" / "sweep", tmp_path / "study")
    analyse(kind(tmp_path / "study"))
