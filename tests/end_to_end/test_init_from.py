"""`seqjax train --init_from=RUN`: the weights of another run, and nothing else."""

import json
import shutil

import jax
import numpy as np
import pytest

from seqjax import pretrained
from seqjax.commands import train as command
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.nn.params import fingerprint, names
from seqjax.sharding import make_mesh, shardings
from seqjax.study.report.tables import remarks
from seqjax.study.runs.record import Record, Records
from seqjax.training import evaluate
from seqjax.training.checkpoint import Checkpoints
from tests import support
from tests.end_to_end.conftest import write_checkpoint

SETTINGS = {"model__n_layers": 1, "train__steps": 4, "checkpoint__every": 2, "eval__every": 0, "log__sample_tokens": 0}
# Other data and optimiser; at rate zero the final weights equal the initial weights.
STILL = SETTINGS | {
    "optim__lr": 0.0,
    "optim__warmup_steps": 1,
    "data__seed": 5,
    "train__seed": 3,
    "train__batch_size": 16,
}


def begin(blocks_dir, workdir, *options, **settings):
    words = support.command(blocks_dir, workdir, "transformer_pp", **settings)[3:]
    command.main([*words, *map(str, options)])


def sha256(workdir) -> str:
    return fingerprint(evaluate.restore(workdir)[2])


@pytest.fixture(scope="module")
def source(blocks_dir, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("source") / "run"
    begin(blocks_dir, workdir, **SETTINGS)
    return workdir


@pytest.fixture(scope="module")
def begun(source, blocks_dir, tmp_path_factory):
    """Start a run from the weights of `source`."""
    workdir = tmp_path_factory.mktemp("begun") / "run"
    begin(blocks_dir, workdir, f"--init_from={source}", **STILL)
    return workdir


@pytest.mark.slow
def test_a_run_begins_with_the_weights_and_says_so(source, begun):
    assert sha256(begun) == sha256(source)
    assert [row["step"] for row in support.rows(begun) if "train/lr" in row] == [1, 2, 3, 4]
    want = {"path": str(source), "step": 4, "sha256": sha256(source)}
    run = json.loads((begun / "run.json").read_text())
    assert run["init_from"] == want
    assert "init_from" not in json.loads((source / "run.json").read_text())
    line = f"began with the weights of {source}, step 4, sha256 {want['sha256'][:16]}"
    assert f"* the run {line}" in (begun / "report.md").read_text()


def test_a_study_says_so():
    init_from = {"path": "/x", "step": 4, "sha256": "0123456789abcdef" * 4}
    runs = [Record(label, label, 0, 1.0, 1.0, [], [], of) for label, of in (("a", {"init_from": init_from}), ("b", {}))]
    said = remarks(Records("title", ("a",), ("d",), (), runs, {"c": "not begun"}, None))
    assert said.strip().split("\n\n") == [
        "**Missing:** c (not begun).",
        "**a** began with the weights of /x, step 4, sha256 0123456789abcdef.",
    ]


def test_a_resumed_run_does_not_need_the_source(begun, blocks_dir, tmp_path, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(begun, workdir)
    shutil.rmtree(workdir / "checkpoints" / "4")  # like a run stopped earlier
    (workdir / "report.md").unlink()
    begin(blocks_dir, workdir, f"--init_from={tmp_path / 'gone'}", **STILL)
    said = capsys.readouterr().err
    assert f"{workdir} has a checkpoint and resumes from it; --init_from={tmp_path / 'gone'} is ignored." in said
    assert "Resuming from step 2 of 4" in said
    assert support.rows(workdir) == support.rows(begun)
    assert sha256(workdir) == sha256(begun)
    init_from = json.loads((begun / "run.json").read_text())["init_from"]
    assert json.loads((workdir / "run.json").read_text())["init_from"] == init_from
    begin(blocks_dir, workdir, **STILL)  # also without the option


def test_a_run_killed_before_its_first_checkpoint_restarts_from_the_same_weights(source, begun, blocks_dir, tmp_path):
    """It does not begin with other weights than it says."""
    workdir = tmp_path / "run"
    shutil.copytree(begun, workdir)
    for step in ("2", "4"):
        shutil.rmtree(workdir / "checkpoints" / step)
    (workdir / "report.md").unlink()
    with pytest.raises(UserError, match=f"weights of {source} .* --init_from={source}"):
        begin(blocks_dir, workdir, **STILL)
    begin(blocks_dir, workdir, f"--init_from={source}", **STILL)
    assert sha256(workdir) == sha256(source)
    assert support.rows(workdir) == support.rows(begun)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model__dim": 32}, r"\(model\.dim: 16 -> 32\)"),
        ({"model__mixer__heads": 4}, r"\(model\.mixer\.heads: 2 -> 4\)"),
        ({"model__norm_eps": 1e-4, "model__n_layers": 2}, r"\(model\.n_layers: 1 -> 2\)"),
    ],
)
def test_another_model_is_refused_with_its_first_different_setting(source, blocks_dir, tmp_path, settings, says):
    with pytest.raises(UserError, match=f"--init_from={source} .*{says}"):
        begin(blocks_dir, tmp_path / "run", f"--init_from={source}", **SETTINGS | settings)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_settings_that_do_not_change_the_model_may_differ(source, blocks_dir, tmp_path):
    free = {
        "model__remat": "full",
        "model__scan_layers": False,
        "model__loss_chunk": 16,
        "model__loss_implementation": "xla",
        "train__steps": 1,
    }
    begin(blocks_dir, tmp_path, f"--init_from={source}", **STILL | free)
    assert sha256(tmp_path) == sha256(source)


def test_a_parameter_of_another_shape_is_named(blocks_dir, tmp_path):
    """The model settings are equal, but the position table has the length of the sequence."""
    config = support.run_config(blocks_dir, "transformer_pp", **SETTINGS | {"model__learned_positions": True})
    write_checkpoint(tmp_path, config, 1)
    longer = support.run_config(
        blocks_dir, "transformer_pp", **SETTINGS | {"model__learned_positions": True, "train__seq_len": 64}
    )
    with pytest.raises(UserError, match=r"position\S* .*\(32, 16\).*\(64, 16\).*config\.train\.seq_len"):
        pretrained.describe_weights(str(tmp_path), longer)


def test_a_dry_run_and_the_help_have_the_option(source, begun, blocks_dir, tmp_path, capsys):
    begin(blocks_dir, tmp_path / "run", f"--init_from={source}", "--dry_run", "--devices=8", **SETTINGS)
    assert f"checkpoint of {source}\n" in capsys.readouterr().out
    begin(blocks_dir, tmp_path / "run", f"--init_from={tmp_path}", "--dry_run", "--devices=8", **SETTINGS)
    assert f"weights      NOT READY: {tmp_path} " in capsys.readouterr().out
    begin(blocks_dir, begun, f"--init_from={tmp_path}", "--dry_run", "--devices=8", **STILL)
    assert "--init_from would be" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "--init_from RUN" in capsys.readouterr().out


@pytest.mark.slow
def test_sparse_attention_continues_a_dense_run(source, blocks_dir, tmp_path):
    """The index is new. While it chooses all 32 keys of a sequence, the model is the dense one."""
    words = support.command(
        blocks_dir, tmp_path / "run", "dsa", **STILL | {"train__steps": 1, "model__mixer__top_k": support.SEQ_LEN}
    )[3:]
    command.main([*words, f"--init_from={source}"])
    _, dense, before, *_ = evaluate.restore(source)
    _, sparse, after, *_ = evaluate.restore(tmp_path / "run")
    old, new = dict(names(before)), dict(names(after))
    assert all((old[name] == new[name]).all() for name in old)
    assert {name.split(".")[3] for name in new.keys() - old} == {"index"}
    assert float(new["blocks.0.mixer.index.q.w"].std()) == pytest.approx(0.02, rel=0.1)
    tokens = support.random_tokens((2, support.SEQ_LEN), dense.config.vocab_size)
    np.testing.assert_allclose(dense.logits(before, tokens), sparse.logits(after, tokens), atol=1e-5)
    init_from = json.loads((tmp_path / "run" / "run.json").read_text())["init_from"]
    assert init_from == {"path": str(source), "step": 4, "sha256": sha256(source)}


def test_sparse_attention_needs_a_dense_run_with_its_settings(source, blocks_dir):
    for key, value, says in (("qk_norm", True, "False -> True"), ("heads", 4, "2 -> 4")):
        settings = SETTINGS | {"model__mixer__top_k": 8, f"model__mixer__{key}": value}
        with pytest.raises(UserError, match=rf"another model .*\(model\.mixer\.{key}: {says}\)"):
            pretrained.describe_weights(str(source), support.run_config(blocks_dir, "dsa", **settings))
    fitting = support.run_config(blocks_dir, "dsa", **SETTINGS | {"model__mixer__top_k": 8})
    assert "5 arrays of the group auxiliary are new" in pretrained.describe_weights(str(source), fitting)
    model, mesh = Model(fitting.model, max_len=support.SEQ_LEN), make_mesh(devices=jax.devices()[:1])
    by_param = shardings(mesh, model.shapes, model.axes)
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.shapes, by_param)
    params, step = pretrained.weights_of(str(source)).read(fitting, target)
    assert (step, fingerprint(params)) == (4, sha256(source))


def test_a_run_without_a_checkpoint_has_no_weights(source, blocks_dir, tmp_path):
    shutil.copytree(source, tmp_path / "source")
    shutil.rmtree(tmp_path / "source" / "checkpoints")
    with pytest.raises(UserError, match=r"no complete .*config\.checkpoint\.every"):
        begin(blocks_dir, tmp_path / "run", f"--init_from={tmp_path / 'source'}", **SETTINGS)


@pytest.mark.slow
def test_a_run_with_ends_gives_the_weights_of_its_last_end(blocks_dir, tmp_path):
    ends = SETTINGS | {"train__ends": (1.0,), "optim__warmup_steps": 1, "optim__cooldown": 0.5}
    begin(blocks_dir, tmp_path / "ends", **ends)
    begin(blocks_dir, tmp_path / "run", f"--init_from={tmp_path / 'ends'}", **STILL)
    assert sha256(tmp_path / "run") == sha256(tmp_path / "ends" / "ends" / "4")
    checkpoints = Checkpoints(tmp_path / "run", read_only=True)
    assert checkpoints.latest == 4
    checkpoints.close()
