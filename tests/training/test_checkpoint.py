"""Checkpoint pruning, atomic saves, and detection of damaged checkpoints."""

import errno
import itertools
import json
import os
import shutil
import threading
import time
from pathlib import Path

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from seqjax.data.pipeline import StreamIterator
from seqjax.errors import UserError
from seqjax.training import checkpoint, checksums
from seqjax.training.checkpoint import DIRECTORY, Checkpoints
from seqjax.training.step import TrainState
from tests import support


@pytest.mark.parametrize(
    ("options", "expected_steps"),
    [({"keep": 2}, [6, 7]), ({"keep": 2, "keep_period": 3}, [3, 6, 7]), ({"keep": 1, "keep_period": 2}, [2, 4, 6, 7])],
)
def test_pruning_keeps_newest_and_period_checkpoints(tmp_path, options, expected_steps):
    checkpoints = Checkpoints(tmp_path, **options)
    for step in range(1, 8):
        checkpoints.save_params(step, {"w": np.full(2, step, np.float32)})
    checkpoints.wait()
    checkpoints.close()
    assert support.checkpoint_steps(tmp_path) == expected_steps


def test_keep_period_must_be_multiple_of_every(blocks_dir):
    assert support.run_config(blocks_dir).checkpoint.keep_period is None
    assert support.run_config(blocks_dir, checkpoint__keep_period=10).checkpoint.keep_period == 10
    for settings in ({"checkpoint__keep_period": 12}, {"checkpoint__keep_period": 10, "checkpoint__every": 0}):
        with pytest.raises(UserError, match=r"config\.checkpoint\.keep_period=1. .*config\.checkpoint\.every=[05]"):
            support.run_config(blocks_dir, **settings)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPERM, errno.EDQUOT])
def test_uncreatable_directory_fails_immediately(tmp_path, monkeypatch, number):
    """Without inodes or in an immutable directory, Orbax's background thread would wait for minutes."""
    mkdir = os.mkdir

    def refuse(path, *args, **options):
        if "orbax-checkpoint-tmp" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        mkdir(path, *args, **options)

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_params(1, {"w": np.zeros(2, np.float32)})
    checkpoints.wait()
    monkeypatch.setattr(os, "mkdir", refuse)
    begin = time.monotonic()
    with pytest.raises(UserError, match=rf"{os.strerror(number)}.*{DIRECTORY}/1"):
        checkpoints.save_params(2, {"w": np.zeros(2, np.float32)})
        checkpoints.wait()
    assert time.monotonic() - begin < 30
    monkeypatch.undo()
    checkpoints.close()


def test_structure_mismatch_does_not_advise_deletion(tmp_path):
    """After an edit of config.json the model differs, but the checkpoint is intact."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save_params(step, {"w": np.zeros(2, np.float32)})
    checkpoints.wait()
    checkpoints.close()
    with pytest.raises(UserError, match=r"config\.json") as caught:
        Checkpoints(tmp_path, read_only=True).restore_params({"v": np.zeros(2, np.float32)})
    assert "delete" not in str(caught.value)
    assert Checkpoints(tmp_path, read_only=True).restore_params({"w": np.zeros(2, np.float32)})[1] == 2


# ------------------------------------------------------------------------------------------------------------- damage
def batches() -> StreamIterator:
    return StreamIterator(iter(grain.MapDataset.range(100).to_iter_dataset()), identity={})


def state(step: int) -> TrainState:
    values = np.random.default_rng(step).normal(size=(40, 50)).astype(np.float32)
    return jax.tree.map(jax.numpy.asarray, TrainState({"w": values}, {"mu": -values}, np.int32(step), np.ones(2)))


def restored(workdir: Path) -> tuple[TrainState, dict, int]:
    """Read the newest checkpoint as a run and as `evaluate` does, and check that both agree."""
    iterator = batches()
    checkpoints = Checkpoints(workdir)
    assert not checkpoints.params_only
    run_state, meta = checkpoints.restore(state(0), iterator)
    checkpoints.close()
    reader = Checkpoints(workdir, read_only=True)
    params, step = reader.restore_params(state(0).params)
    reader.close()
    assert np.array_equal(params["w"], run_state.params["w"])
    assert step == run_state.step
    return run_state, meta, next(iterator)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of steps 3, 6 and 9."""
    workdir = tmp_path_factory.mktemp("saved") / "run"
    iterator, checkpoints = batches(), Checkpoints(workdir, keep=3)
    for step in (3, 6, 9):
        assert next(iterator) == step // 3 - 1
        checkpoints.save(step, state(step), iterator, {"metrics": 100 * step})
    checkpoints.wait()
    checkpoints.close()
    return workdir


@pytest.fixture
def workdir(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def largest(item: Path) -> Path:
    """Return the file with the array values."""
    return max((path for path in item.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    """Flip a bit in the middle; decompression does not detect it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


DAMAGE = {
    "flipped parameter bit": (lambda d: flip(largest(d / "params")), r"params/\S+ was changed"),
    "flipped optimiser bit": (lambda d: flip(largest(d / "rest")), r"rest/\S+ was changed"),
    "changed data position": (
        lambda d: (d / "data/process_0-of-1.json").write_text('{"next_index": 7}'),
        r"data/process_0-of-1\.json (was changed|has \d+ bytes)",
    ),
    "truncated array": (lambda d: shorten(largest(d / "params")), r"params/\S+ has 500 bytes"),
    "missing file": (lambda d: largest(d / "rest").unlink(), r"rest/\S+ .*\(No such "),
    "empty directory": (lambda d: [shutil.rmtree(d), d.mkdir()], r"_CHECKPOINT_METADATA is missing"),
    "truncated metadata": (
        lambda d: (d / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"par'),
        r"_CHECKPOINT_METADATA is damaged",
    ),
    "metadata not an object": (
        lambda d: (d / "_CHECKPOINT_METADATA").write_text("true"),
        r"_CHECKPOINT_METADATA is damaged",
    ),
    "deeply nested metadata": (
        lambda d: (d / "_CHECKPOINT_METADATA").write_text("[" * 100_000),
        r"_CHECKPOINT_METADATA is damaged",
    ),
    "no checksums": (lambda d: (d / "checksums.json").unlink(), r"checksums\.json is missing"),
    **{f"no {name}": (lambda d, name=name: shutil.rmtree(d / name), f"the item '{name}'") for name in checkpoint.STATE},
}


def test_restore_returns_saved_state(workdir):
    run_state, meta, item = restored(workdir)
    assert np.array_equal(run_state.opt_state["mu"], state(9).opt_state["mu"])
    assert (int(run_state.step), meta, item) == (9, {"metrics": 900}, 3)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_error_leads_to_newest_intact_checkpoint(workdir, kind):
    """Following the advice works, also if the next older checkpoint is damaged too."""
    damage, pattern = DAMAGE[kind]
    newest, middle = (workdir / "checkpoints" / str(step) for step in (9, 6))
    damage(newest)
    flip(largest(middle / "params"))
    with pytest.raises(UserError, match=pattern) as caught:
        restored(workdir)
    assert f" 3, delete {newest} and {middle} " in str(caught.value)
    shutil.rmtree(newest)
    shutil.rmtree(middle)
    run_state, meta, item = restored(workdir)
    assert (int(run_state.step), meta, item) == (3, {"metrics": 300}, 1)


def test_reader_accepts_damaged_optimiser_state(workdir):
    flip(largest(workdir / "checkpoints" / "9" / "rest"))
    reader = Checkpoints(workdir, read_only=True)
    params, step = reader.restore_params(state(0).params)
    reader.close()
    assert step == 9
    assert np.array_equal(params["w"], state(9).params["w"])


def test_metadata_rejected_by_orbax_names_the_file(workdir):
    path = workdir / "checkpoints" / "9" / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit_timestamp_nsecs": "noon"}))
    with pytest.raises(UserError, match=r"/checkpoints is damaged: .*_CHECKPOINT_METADATA .*(noon|int)"):
        restored(workdir)


def test_error_when_every_checkpoint_is_damaged(workdir):
    for step in (3, 6, 9):
        shutil.rmtree(workdir / "checkpoints" / str(step) / "rest")
    with pytest.raises(UserError, match=r"checkpoints/9 is damaged.*--workdir") as caught:
        restored(workdir)
    assert "delete" not in str(caught.value)


def without_checksums(directory: Path) -> None:
    """Remove the checksums, which checkpoints on gs:// do not have."""
    (directory / "checksums.json").unlink()
    path = directory / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"custom_metadata": {}}))


def test_checkpoint_without_checksums_still_checks_items(workdir):
    newest = workdir / "checkpoints" / "9"
    without_checksums(newest)
    assert restored(workdir)[0].step == 9
    shorten(largest(newest / "params"))
    with pytest.raises(UserError, match=r"checkpoints/9 .*cannot .*\(.* 6, delete"):
        restored(workdir)
    shutil.rmtree(newest / "rest")
    with pytest.raises(UserError, match=r"checkpoints/9 .*item 'rest'"):
        restored(workdir)


def test_checkpoint_removed_during_read_is_not_damage(workdir, monkeypatch):
    """A run in another process removes it; the reader then takes the newest remaining checkpoint."""
    reader = Checkpoints(workdir, read_only=True)
    newest, renamed = workdir / "checkpoints" / "9", workdir / "checkpoints" / "12"
    check = checksums.check

    def slow_check(directory, names, **options):
        if directory.name == "9":
            newest.rename(renamed)
        check(directory, names, **options)

    monkeypatch.setattr(checkpoint, "check", slow_check)
    params, step = reader.restore_params(state(0).params)
    reader.close()
    assert step == 12
    assert np.array_equal(params["w"], state(9).params["w"])


def test_checkpoint_removed_during_open_is_retried(workdir, monkeypatch):
    manager, tries = ocp.CheckpointManager, []

    def open_manager(*args, **options):
        tries.append(1)
        if len(tries) == 1:
            raise FileNotFoundError(workdir / "checkpoints" / "6")
        return manager(*args, **options)

    monkeypatch.setattr(ocp, "CheckpointManager", open_manager)
    reader = Checkpoints(workdir, read_only=True)
    assert reader.restore_params(state(0).params)[1] == 9
    reader.close()


@pytest.mark.slow
def test_concurrent_reader_and_writer(tmp_path):
    """The writer keeps one checkpoint, so each may be removed during a read."""
    writer = Checkpoints(tmp_path, keep=1)
    writer.save_params(0, {"w": np.zeros((64, 64), np.float32)})
    writer.wait()
    stop = threading.Event()

    def save():
        for step in itertools.count(1):
            if stop.is_set():
                return
            writer.save_params(step, {"w": np.full((64, 64), step, np.float32)})

    thread = threading.Thread(target=save)
    thread.start()
    try:
        steps = []
        for _ in range(200):
            reader = Checkpoints(tmp_path, read_only=True)
            params, step = reader.restore_params({"w": np.zeros((64, 64), np.float32)})
            reader.close()
            assert (np.asarray(params["w"]) == step).all()
            steps.append(step)
    finally:
        stop.set()
        thread.join()
        writer.wait()
        writer.close()
    assert steps == sorted(steps)
    assert len(set(steps)) > 5


def test_stream_rejects_different_process_count(workdir):
    """Three processes saved the checkpoint: it is intact, and no earlier one would help."""
    position = workdir / "checkpoints" / "9" / "data" / "process_0-of-1.json"
    for index in range(3):
        shutil.copy(position, position.with_name(f"process_{index}-of-3.json"))
    position.unlink()
    checkpoints = Checkpoints(workdir)
    with pytest.raises(UserError, match=r"processes 3 -> 1\b.*seqjax prepare"):
        checkpoints.restore(state(0), batches())
    checkpoints.close()


def test_lost_lock_on_a_store_leaves_the_checkpoint_incomplete(server):
    """The lock is read again before the checkpoint becomes complete."""
    held = True

    def check() -> None:
        if not held:
            raise UserError("run.lock names another process")

    writer = Checkpoints(f"{server.url}/run", before_commit=check)
    for step in (1, 2):
        writer.save_params(step, {"w": np.full((4, 4), step, np.float32)})
        if held:
            writer.wait()
        held = False
    with pytest.raises(UserError, match=r"run\.lock"):
        writer.wait()
    reader = Checkpoints(f"{server.url}/run", read_only=True)
    params, step = reader.restore_params({"w": np.zeros((4, 4), np.float32)})
    assert step == 1 and (np.asarray(params["w"]) == 1).all()
    reader.close()
