"""A finished run with damaged results: the same command recomputes what it can, bit-equal, and names the rest."""

import os
import re
import shutil

import pytest

from seqjax.errors import UserError
from seqjax.study.runs.collect import read_points
from seqjax.training import eval_losses
from seqjax.training.loop import train
from tests import support

STEPS = 4
SETTINGS = {"train__steps": STEPS, "eval__every": 2 * 8 * support.SEQ_LEN, "eval__classes": True, "model__n_layers": 1}


@pytest.fixture(scope="module")
def finished(blocks_dir, tmp_path_factory):
    """Return a config and its finished workdir, with evaluations after steps 2 and 4."""
    config = support.run_config(blocks_dir, "transformer_pp", **SETTINGS)
    workdir = tmp_path_factory.mktemp("finished") / "run"
    assert train(config, workdir)
    return config, workdir


@pytest.fixture
def damaged(finished, tmp_path):
    """Copy the workdir for damage; return it with the files that a study reads."""
    config, workdir = finished
    shutil.copytree(workdir, tmp_path / "run")
    return config, tmp_path / "run"


def content(workdir):
    files = sorted((workdir / eval_losses.DIRECTORY).iterdir())
    return {path.name: path.read_bytes() for path in files}, read_points(workdir), support.rows(workdir)


@pytest.mark.parametrize(
    ("name", "how"), [("00000004.npz", "missing"), ("00000004.npz", "damaged"), ("classes.npz", "damaged")]
)
def test_losses_of_the_last_evaluation_are_recomputed(damaged, capsys, name, how):
    config, workdir = damaged
    before, path = content(workdir), workdir / eval_losses.DIRECTORY / name
    if how == "damaged":
        path.write_bytes(os.urandom(200))
    else:
        path.unlink()
    assert train(config, workdir)
    assert re.search(f"{path} .*{how}; .*recomputed", capsys.readouterr().err)
    assert content(workdir) == before
    assert train(config, workdir)
    assert "recomputed" not in capsys.readouterr().err


def test_losses_that_differ_from_the_rows_are_not_written(damaged):
    config, workdir = damaged
    path, rows = eval_losses.path(workdir, STEPS), workdir / "metrics.jsonl"
    path.unlink()
    text = rows.read_text()
    at = text.rindex('"eval/arxiv/loss": ') + len('"eval/arxiv/loss": ')
    digit = text[at + 4]
    rows.write_text(text[: at + 4] + ("1" if digit == "2" else "2") + text[at + 5 :])
    with pytest.raises(UserError, match=r"00000004\.npz .* 4 .*other losses .*metrics\.jsonl"):
        train(config, workdir)
    assert not path.exists()


def test_an_earlier_evaluation_cannot_be_recomputed(damaged):
    config, workdir = damaged
    eval_losses.path(workdir, 2).write_bytes(os.urandom(200))
    with pytest.raises(UserError, match=r"/00000002\.npz .*damaged .*again\."):
        train(config, workdir)


def test_missing_results_of_an_earlier_evaluation_are_named(damaged, capsys):
    config, workdir = damaged
    path = eval_losses.path(workdir, 2)
    path.unlink()
    assert train(config, workdir)
    assert f"{path} is missing. " in capsys.readouterr().err


def test_block_descriptions_are_written_again(damaged, capsys):
    config, workdir = damaged
    before = content(workdir)
    (workdir / eval_losses.DIRECTORY / "blocks.npz").unlink()
    assert train(config, workdir)
    assert content(workdir) == before
    assert "is missing" not in capsys.readouterr().err


@pytest.mark.slow
def test_an_end_with_a_checkpoint_is_evaluated_again(blocks_dir, tmp_path, capsys):
    """test_ends.py covers ends without a checkpoint, which are named."""
    ends = {"train__ends": (1.0,), "optim__warmup_steps": 1, "optim__cooldown": 0.5}
    config = support.run_config(blocks_dir, "transformer_pp", **SETTINGS | ends)
    assert train(config, tmp_path)
    path = eval_losses.path(tmp_path / "ends" / "4", STEPS)
    before = content(tmp_path / "ends" / "4")
    path.write_bytes(b"")
    assert train(config, tmp_path)
    assert re.search(f"{path} .*damaged; .*recomputed", capsys.readouterr().err)
    assert content(tmp_path / "ends" / "4") == before
    kept = tmp_path / "ends" / "4" / "checkpoints" / "4"
    next((kept / "params").glob("manifest*")).write_bytes(b"other")
    with pytest.raises(UserError, match=f"{kept} is damaged: params/manifest"):
        train(config, tmp_path)
