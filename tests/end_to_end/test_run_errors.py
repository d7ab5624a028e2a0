"""Errors in a run name the fix, end with status 2 and lose nothing that was saved."""

import dataclasses
import functools
import json
import os
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.commands import evaluate, generate
from seqjax.commands import train as train_command
from seqjax.errors import UserError
from seqjax.training import loop as train_module
from seqjax.training import metrics, mirrors
from seqjax.training import step as step_module
from seqjax.training import workdir as workdirs
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.lock import locked
from seqjax.training.loop import train
from seqjax.training.step import make_train_step
from seqjax.training.writers import Metrics
from tests import support
from tests.golden import commands

SYNCED = []  # bytes of `metrics.jsonl` synced by the run `midway`
COUNTED_ON = []  # bytes recorded in a checkpoint, and bytes synced before


@pytest.fixture(scope="module")
def midway(blocks_dir, tmp_path_factory):
    """A run that ended at step 15 of 24, with checkpoints of steps 12 and 15; no signal, no process."""
    workdir = tmp_path_factory.mktemp("midway") / "run"
    config = settings(blocks_dir)
    save = Checkpoints.save

    def seen_save(self, step, state, iterator, meta):
        COUNTED_ON.append((meta["metrics"], SYNCED[-1]))
        save(self, step, state, iterator, meta)

    def agreed(self):
        self.agreed_on = support.n_rows(workdir) >= 14
        return self.agreed_on

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "sync", lambda self: SYNCED.append(self.position))
        patch.setattr(Checkpoints, "save", seen_save)
        patch.setattr(train_module.StopRequest, "agreed", agreed)
        assert train(config, workdir) is False
    assert support.checkpoint_steps(workdir) == [12, 15]
    return workdir


def settings(blocks_dir, **overrides):
    return support.run_config(
        blocks_dir, "transformer_pp", **({"train__steps": 24, "checkpoint__every": 4, "eval__every": 0} | overrides)
    )


@pytest.fixture
def workdir(midway, tmp_path):
    shutil.copytree(midway, tmp_path / "run")
    return tmp_path / "run"


# ------------------------------------------------------------------------------------- another config, data
def test_another_config_is_refused_with_its_keys(blocks_dir, workdir):
    before = (workdir / "config.json").read_text()
    with pytest.raises(UserError) as caught:
        train(settings(blocks_dir, optim__lr=1.0, model__mixer__window=8), workdir)
    assert "optim.lr: 0.002 -> 1.0" in str(caught.value)
    assert "model.mixer.window: None -> 8" in str(caught.value)
    assert "another --workdir" in str(caught.value)
    assert "train.seed" not in str(caught.value)
    assert (workdir / "config.json").read_text() == before


@pytest.mark.slow
def test_settings_outside_the_identity_may_change(blocks_dir, workdir, tmp_path):
    shutil.copytree(blocks_dir, tmp_path / "moved")
    changed = settings(tmp_path / "moved", log__every=10, checkpoint__every=7, mesh__fsdp=2)
    assert train(changed, workdir) is True
    steps = [r["step"] for r in support.rows(workdir) if "train/lr" in r]
    assert steps == [*range(1, 16), 20, 24]
    assert json.loads((workdir / "config.json").read_text())["log"]["every"] == 10


def test_other_data_under_a_workdir_is_refused(workdir, tmp_path):
    other = support.write_blocks(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=r"manifest|data: '\w+' -> '\w+'"):
        train(settings(other), workdir)
    assert support.checkpoint_steps(workdir) == [12, 15]


def test_no_data_is_an_error_before_anything_else(blocks_dir, tmp_path):
    with pytest.raises(UserError, match=r"config\.data\.path.*seqjax prepare"):
        train(settings(tmp_path / "nothing"), tmp_path / "run")
    with pytest.raises(UserError, match=r"config\.train\.seq_len=32"):
        train(settings(blocks_dir, train__seq_len=16), tmp_path / "run2")
    with pytest.raises(UserError, match=r"258 ids.*config\.model\.vocab_size"):
        train(settings(blocks_dir, model__vocab_size=100), tmp_path / "run3")


def test_a_batch_that_devices_cannot_split(blocks_dir, tmp_path):
    with pytest.raises(UserError, match=r"train\.accumulate=2: .* 4 .*data=8.*None.*config\.train\.batch_size"):
        train(settings(blocks_dir, train__accumulate=2), tmp_path / "run")
    with pytest.raises(UserError, match=r"config\.train\.batch_size=12 .*data=8.* 8 and 16\."):
        train(settings(blocks_dir, train__batch_size=12), tmp_path / "run")


def test_a_refused_run_blocks_no_later_command(blocks_dir, tmp_path, monkeypatch):
    """The workdir accepts the command in each error; without --workdir no directory remains."""
    workdir = tmp_path / "deep" / "run"
    refused = {"model__mixer__heads": 1, "train__steps": 1}
    with pytest.raises(UserError, match=r"config\.data\.path"):
        train(settings(tmp_path / "nothing", **refused), workdir)
    with pytest.raises(UserError, match=r"config\.train\.batch_size"):
        train(settings(blocks_dir, train__accumulate=2, **refused), workdir)
    assert not workdir.exists()
    kept = tmp_path / "kept"
    kept.mkdir()
    with pytest.raises(UserError, match=r"config\.data\.path"):
        train(settings(tmp_path / "nothing"), kept)
    assert list(kept.iterdir()) == []

    def no_memory(*args, **options):
        def step(state, tokens, rate):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        return step

    with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError):
        patch.setattr(train_module, "jit_train_step", no_memory)
        train(settings(blocks_dir, **refused), workdir)
    assert not (workdir / "config.json").exists()
    workdirs.check_config(workdir, settings(blocks_dir))

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"config\.train\.batch_size"):
        train_command.main(["--config=transformer_pp:debug,train.batch_size=1"])
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_second_run_in_one_workdir_is_refused_and_readers_are_not(blocks_dir, workdir, capsys):
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    with locked(workdir):
        with pytest.raises(UserError, match=f"{workdir} .*in use .* {os.getpid()} "):
            train(settings(blocks_dir, log__every=10), workdir)
        evaluate.main([f"--workdir={workdir}", "--tokens=64"])
        generate.main([f"--workdir={workdir}", "--max_new_tokens=1"])
    assert "step 15, nats" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in before} == before
    assert not (workdir / "run.lock").exists()


# ------------------------------------------------------------------------------------- damaged files
def test_a_checkpoint_without_its_optimiser_state_is_refused(blocks_dir, workdir):
    """It is not a parameter checkpoint, from which a run would start with a fresh optimiser."""
    before = (workdir / "metrics.jsonl").read_bytes()
    shutil.rmtree(workdir / "checkpoints" / "15" / "rest")
    with pytest.raises(UserError, match=r"checkpoints/15 .*'rest' .* 12, delete"):
        train(settings(blocks_dir), workdir)
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_lost_rows_stop_the_run(blocks_dir, workdir):
    path = workdir / "metrics.jsonl"
    torn = path.read_bytes()[:-100]
    path.write_bytes(torn)
    with pytest.raises(UserError, match=r"step 15 .*delete \S+/checkpoints/15 "):
        train(settings(blocks_dir), workdir)
    assert path.read_bytes() == torn


def test_damaged_blocks_of_a_finished_run_are_reported(blocks_dir, workdir):
    """A study would be the first to read them. Damaged losses are recomputed (test_finished.py)."""
    config = settings(blocks_dir)
    assert train(config, workdir) is True
    (workdir / "eval_losses" / "blocks.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"eval_losses/blocks\.npz .*damaged.*again\."):
        train(config, workdir)


def test_rows_are_synced_before_a_checkpoint_counts_on_them(midway):
    del midway
    assert len(COUNTED_ON) == 4
    for counted_on, synced in COUNTED_ON:
        assert counted_on == synced > 0


# ------------------------------------------------------------------------------------- not finite
def test_a_loss_that_is_not_finite_stops_the_run(blocks_dir, workdir, monkeypatch):
    """NaN at step 18, two steps after the checkpoint of step 16."""

    def poisoned(*args):
        step = make_train_step(*args)

        def train_step(state, tokens, rate):
            new, values = step(state, tokens, rate)
            return new, {**values, "loss": jnp.where(state.step == 17, jnp.nan, values["loss"])}

        return train_step

    monkeypatch.setattr(step_module, "make_train_step", poisoned)
    with pytest.raises(UserError) as caught:
        train(settings(blocks_dir), workdir)
    text = str(caught.value)
    assert "Step 18: loss nan" in text
    assert "step 16" in text
    assert "config.optim.lr" in text
    kept = workdir / "not_finite_step18.npz"
    assert str(kept) in text
    assert np.load(kept)["tokens"].shape == (8, support.SEQ_LEN + 1)
    assert support.checkpoint_steps(workdir) == [15, 16]
    assert [r["step"] for r in support.rows(workdir)][-1] == 17, "what is not a number is not written as one"


def test_a_run_that_diverges_at_once_reports_that_nothing_was_saved(blocks_dir, tmp_path):
    with pytest.raises(UserError, match=r" [12]: .*no checkpoint .*config\.optim\.lr"):
        train(settings(blocks_dir, optim__lr=1e30, optim__warmup_steps=0), tmp_path / "run")


# ------------------------------------------------------------------------------------- broken workdirs
@pytest.mark.parametrize("command", [evaluate.main, generate.main])
def test_commands_refuse_a_directory_without_a_run(command, workdir, tmp_path):
    with pytest.raises(UserError, match=r"/nothing .*no config\.json\..*--workdir"):
        command([f"--workdir={tmp_path / 'nothing'}"])
    shutil.rmtree(workdir / "checkpoints")
    with pytest.raises(UserError, match=r"no complete .*config\.checkpoint\.every"):
        command([f"--workdir={workdir}"])
    (workdir / "checkpoints").mkdir()
    (workdir / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir()  # files of a killed save
    with pytest.raises(UserError, match=r"no complete .*config\.checkpoint\.every"):
        command([f"--workdir={workdir}"])
    (workdir / "config.json").write_text('{"name": "tor')
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        command([f"--workdir={workdir}"])


def test_a_run_restarts_if_no_checkpoint_is_complete(blocks_dir, workdir):
    """Killed in its first save: earlier rows are written again, once."""
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)
    rows = (workdir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_bytes(b"".join(rows[:6]))
    assert train(settings(blocks_dir), workdir) is True
    assert [r["step"] for r in support.rows(workdir) if "train/lr" in r] == list(range(1, 25))


@pytest.mark.parametrize("left", ["nothing", "the directory", "the directory of a finished run"])
def test_a_run_without_its_checkpoints_is_not_overwritten(blocks_dir, workdir, left):
    shutil.rmtree(workdir / "checkpoints")
    if left != "nothing":
        (workdir / "checkpoints").mkdir()
    config = settings(blocks_dir)
    if "finished" in left:
        (workdir / "report.md").write_text("")
        text = (workdir / "config.json").read_text()
        (workdir / "config.json").write_text(text.replace('"every": 4', '"every": 0'))
    before = (workdir / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r" 15 .*no checkpoint .*/checkpoints, .*--workdir"):
        train(config, workdir)
    assert (workdir / "metrics.jsonl").read_bytes() == before
    (workdir / "metrics.jsonl").rename(workdir / "before.jsonl")
    metrics.require_checkpoint(mirrors.Mirror(workdir))  # the remedy in the error


def test_a_corrupt_config_is_not_overwritten(blocks_dir, workdir):
    (workdir / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON"):
        train(settings(blocks_dir), workdir)
    (workdir / "config.json").unlink()
    with pytest.raises(UserError, match=r"/run .*checkpoints .*no config\.json"):
        train(settings(blocks_dir), workdir)
    file = workdir / "file"
    file.write_text("")
    with pytest.raises(UserError, match=r"/file .*a directory"):
        train(settings(blocks_dir), file)


def test_generate_refuses_meaningless_options(workdir):
    for option in ("--max_new_tokens=0", "--temperature=-1", "--top_k=-1", "--top_k=100000", "--top_p=0", "--stop="):
        with pytest.raises(UserError, match=r"^(max_new_tokens|temperature|top_k|top_p|stop)\b"):
            generate.main([f"--workdir={workdir}", option])


def test_generate_refuses_invalid_seeds_and_temperatures(workdir):
    for option in ("--temperature=nan", "--seed=-1", "--seed=99999999999999999999999"):
        with pytest.raises(UserError, match=r"^(temperature|seed) .*least 0"):
            generate.main([f"--workdir={workdir}", option])


@pytest.mark.slow
def test_a_run_with_a_moved_workdir_stops_and_resumes_there(blocks_dir, workdir, monkeypatch):
    elsewhere = workdir.with_name("elsewhere")

    def moved(self):
        if support.n_rows(workdir) == 17:
            workdir.rename(elsewhere)
        return False

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"was moved .*--workdir=DIR"):
        patch.setattr(train_module.StopRequest, "agreed", moved)
        train(settings(blocks_dir), workdir)
    # A save in progress creates its directory again at the old path; it never counts as a checkpoint.
    assert not (workdir / "checkpoints").exists() or support.checkpoint_steps(workdir) == []
    assert train(settings(blocks_dir), elsewhere) is True
    assert [r["step"] for r in support.rows(elsewhere) if "train/lr" in r] == list(range(1, 25))


def test_a_deleted_workdir_is_reported(blocks_dir, workdir, monkeypatch):
    """For every kind of write; a missing file elsewhere is not reported as this."""

    def writes(*_, path, deleted: bool, manifest: str):
        if deleted:
            shutil.rmtree(workdir)
        path.open("ab")

    def refused(path, error, says, *, deleted: bool = False):
        monkeypatch.setattr(train_module, "_train_segments", functools.partial(writes, path=path, deleted=deleted))
        with pytest.raises(error, match=says):
            train(settings(blocks_dir), workdir)

    refused(workdir.with_name("elsewhere") / "x", FileNotFoundError, "elsewhere")
    refused(workdir / "ends" / "12" / "x", UserError, r"ends/12/x .*deleted while")
    refused(workdir / "metrics.jsonl", UserError, r"was moved .*--workdir=DIR", deleted=True)


# ------------------------------------------------------------------------------------- the command line
def test_overrides_are_distinguished_from_flags():
    argv = ["--workdir=a", "--config.train.steps=3", "--config=b.py:debug", "--config.data.path", "c=d", "-v=1"]
    rest, overrides = train_command.split_overrides(argv)
    assert rest == ["--workdir=a", "--config=b.py:debug", "-v=1"]
    assert overrides == [("train.steps", "3"), ("data.path", "c=d")]
    with pytest.raises(UserError, match=r"--config\.train\.steps .*=VALUE"):
        train_command.split_overrides(["--config.train.steps"])


@pytest.mark.slow
def test_exit_status_and_no_traceback(blocks_dir, workdir):
    """In real processes: a message on stderr, status 2, no traceback."""
    said = {
        ("--config=configs/top1_chunk.py:debug,trian.steps=3",): "'train'",
        (
            "--config=top1_chunk:debug",
            "--config.model.mixer.selection=exactly",
        ): "config.model.mixer.selection='exactly' .*'exact'",
        (): "--config=top1_chunk. Shipped: based, ",
        ("top1_chunk",): "top1_chunk: write --config=top1_chunk.",
        tuple(support.command(blocks_dir, workdir, "transformer_pp", train__seed=5)[3:]): "train.seed: 0 -> 5",
    }
    results = commands.run([["seqjax.main", *args] for args in said])
    for result, says in zip(results, said.values(), strict=True):
        assert result.status == 2, result.stderr
        assert "error: " in result.stderr
        assert re.search(says, result.stderr)
        assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_shipped_config_is_known_elsewhere(workdir):
    args = ["--config=top1_chunk:debug", "--config.model.mixer.selection=exactly"]
    environment = {**support.environment(), "PYTHONPATH": str(support.ROOT)}
    result = support.run([sys.executable, "-m", "seqjax.main", *args], cwd=workdir, env=environment)
    assert result.returncode == 2
    assert "'exact'" in result.stderr


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.parametrize("who", ["checkpoint", pytest.param("metrics", marks=pytest.mark.slow)])
def test_a_full_disk_keeps_the_last_good_checkpoint(blocks_dir, workdir, who):
    """A limit on file sizes gives the kernel's error for a full disk, in Orbax or in the next row of metrics."""
    written = (workdir / "metrics.jsonl").stat().st_size
    assert written > (workdir / "config.json").stat().st_size, "the limit must let the config through"
    # Orbax packs arrays into files in arrival order, so sizes vary; but one array is in one file. The
    # limit is below the embedding's (16 KB, random bits), above what nine more rows of metrics take.
    limit = written + (4_000 if who == "checkpoint" else 50)
    embedding_bytes = 4 * settings(blocks_dir).model.vocab_size * settings(blocks_dir).model.dim
    assert limit < 0.6 * embedding_bytes
    args = support.command(blocks_dir, workdir, "transformer_pp", train__steps=24, checkpoint__every=4, eval__every=0)
    full = support.run([sys.executable, "-c", LIMITED, str(limit), *args])
    assert full.returncode == 2, full.stderr
    last = full.stderr[full.stderr.rindex("error: ") :]
    assert f"the last good checkpoint is {workdir / 'checkpoints' / '15'}" in last
    assert "Free some disk space" in last
    assert "Traceback" not in full.stderr, "those of Orbax's threads say nothing that the message does not"
    assert ("orbax-checkpoint-tmp" in last) == (who == "checkpoint"), "the other one failed first"
    assert support.checkpoint_steps(workdir) == [12, 15]


@pytest.mark.slow
def test_a_run_resumes_after_a_full_disk(blocks_dir, workdir):
    """Files of the failed save do not prevent it."""
    (workdir / "checkpoints" / "16.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    assert train(settings(blocks_dir), workdir) is True
    assert support.checkpoint_steps(workdir) == [20, 24]


def test_mesh_sizes_that_do_not_fit(blocks_dir, tmp_path):
    config = settings(blocks_dir)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, tensor=3))
    with pytest.raises(UserError, match=r"config\.mesh.*8 device"):
        train(config, tmp_path / "run")
