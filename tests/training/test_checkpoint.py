"""Which checkpoints stay, and that one which is no longer what was written is named and not read."""

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
    ("options", "want"),
    [({"keep": 2}, [6, 7]), ({"keep": 2, "keep_period": 3}, [3, 6, 7]), ({"keep": 1, "keep_period": 2}, [2, 4, 6, 7])],
)
def test_the_newest_stay_and_those_of_the_period(tmp_path, options, want):
    checkpoints = Checkpoints(tmp_path, **options)
    for step in range(1, 8):
        checkpoints.save_params(step, {"w": np.full(2, step, np.float32)})
    checkpoints.wait()
    checkpoints.close()
    assert support.checkpoint_steps(tmp_path) == want


def test_the_period_must_be_one_of_saved_steps(blocks_dir):
    """Settings of a run: every 5 steps."""
    assert support.run_config(blocks_dir).checkpoint.keep_period is None
    assert support.run_config(blocks_dir, checkpoint__keep_period=10).checkpoint.keep_period == 10
    for settings in ({"checkpoint__keep_period": 12}, {"checkpoint__keep_period": 10, "checkpoint__every": 0}):
        with pytest.raises(
            UserError, match=r"keep_period=1. keeps saved checkpoints.*multiple of config\.checkpoint\.every"
        ):
            support.run_config(blocks_dir, **settings)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPERM, errno.EDQUOT])
def test_a_directory_that_cannot_be_created_is_an_error_at_once(tmp_path, monkeypatch, number):
    """No inodes are left, or the directory is immutable: Orbax's other thread would let the save wait for minutes."""
    made = os.mkdir

    def refuse(path, *args, **options):
        if "orbax-checkpoint-tmp" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        made(path, *args, **options)

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_params(1, {"w": np.zeros(2, np.float32)})
    checkpoints.wait()
    monkeypatch.setattr(os, "mkdir", refuse)
    begin = time.monotonic()
    with pytest.raises(UserError, match=rf"{DIRECTORY}/1.*{os.strerror(number)}"):
        checkpoints.save_params(2, {"w": np.zeros(2, np.float32)})
        checkpoints.wait()
    assert time.monotonic() - begin < 30
    monkeypatch.undo()
    checkpoints.close()


def test_no_whole_checkpoint_is_to_be_deleted(tmp_path):
    """Its run has another model now, because a config.json was edited; the checkpoint is what was written."""
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
    """The newest checkpoint, read as a run does and as `evaluate` does; the two agree."""
    iterator = batches()
    checkpoints = Checkpoints(workdir)
    assert not checkpoints.params_only
    found, meta = checkpoints.restore(state(0), iterator)
    checkpoints.close()
    reader = Checkpoints(workdir, read_only=True)
    params, step = reader.restore_params(state(0).params)
    reader.close()
    assert np.array_equal(params["w"], found.params["w"])
    assert step == found.step
    return found, meta, next(iterator)


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
    """The file with the values of the arrays."""
    return max((path for path in item.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    """Another bit in the middle, which the decompression does not notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


DAMAGE = {
    "a bit of the parameters": (lambda d: flip(largest(d / "params")), r"params/\S+ was changed: its checksum"),
    "a bit of the optimiser": (lambda d: flip(largest(d / "rest")), r"rest/\S+ was changed: its checksum"),
    "a digit of the place in the data": (
        lambda d: (d / "data/process_0-of-1.json").write_text('{"next_index": 7}'),
        r"data/process_0-of-1\.json (was changed|has \d+ bytes)",
    ),
    "an array is truncated": (lambda d: shorten(largest(d / "params")), r"params/\S+ has 500 bytes, \d+ were written"),
    "a file is gone": (lambda d: largest(d / "rest").unlink(), r"rest/\S+ cannot be read \(No such file"),
    "empty": (lambda d: [shutil.rmtree(d), d.mkdir()], r"_CHECKPOINT_METADATA is missing"),
    "cut metadata": (
        lambda d: (d / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"par'),
        r"_CHECKPOINT_METADATA is damaged",
    ),
    "metadata of another shape": (
        lambda d: (d / "_CHECKPOINT_METADATA").write_text("true"),
        r"_CHECKPOINT_METADATA is damaged",
    ),
    "metadata without end": (
        lambda d: (d / "_CHECKPOINT_METADATA").write_text("[" * 100_000),
        r"_CHECKPOINT_METADATA is damaged",
    ),
    "no checksums": (lambda d: (d / "checksums.json").unlink(), r"checksums\.json is missing"),
    **{
        f"no {name}": (lambda d, name=name: shutil.rmtree(d / name), f"the item '{name}' is missing")
        for name in checkpoint.STATE
    },
}


def test_what_was_saved_comes_back(workdir):
    found, meta, item = restored(workdir)
    assert np.array_equal(found.opt_state["mu"], state(9).opt_state["mu"])
    assert (int(found.step), meta, item) == (9, {"metrics": 900}, 3)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_way_to_the_checkpoint_before(workdir, kind):
    """Which is then followed. Two are damaged, so the one to go back to is not the next."""
    harm, says = DAMAGE[kind]
    newest, middle = (workdir / "checkpoints" / str(step) for step in (9, 6))
    harm(newest)
    flip(largest(middle / "params"))
    with pytest.raises(UserError, match=says) as caught:
        restored(workdir)
    text = str(caught.value)
    assert text.startswith(f"The checkpoint {newest} is damaged: ")
    assert f"The one of step 3 before it is whole: delete {newest} and {middle} and run the same command again" in text
    shutil.rmtree(newest)
    shutil.rmtree(middle)
    found, meta, item = restored(workdir)
    assert (int(found.step), meta, item) == (3, {"metrics": 300}, 1)


def test_a_command_reads_the_parameters_of_a_checkpoint_whose_optimiser_is_damaged(workdir):
    flip(largest(workdir / "checkpoints" / "9" / "rest"))
    reader = Checkpoints(workdir, read_only=True)
    params, step = reader.restore_params(state(0).params)
    reader.close()
    assert step == 9
    assert np.array_equal(params["w"], state(9).params["w"])


def test_metadata_that_orbax_refuses_for_another_reason(workdir):
    path = workdir / "checkpoints" / "9" / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"commit_timestamp_nsecs": "noon"}))
    with pytest.raises(
        UserError, match=r"A checkpoint in \S+checkpoints is damaged: its _CHECKPOINT_METADATA.*noon|int"
    ):
        restored(workdir)


def test_no_whole_checkpoint_is_left(workdir):
    for step in (3, 6, 9):
        shutil.rmtree(workdir / "checkpoints" / str(step) / "rest")
    with pytest.raises(UserError, match=r"checkpoints/9 is damaged.*No whole one was made before.*another --workdir"):
        restored(workdir)


def without_checksums(directory: Path) -> None:
    """Take away what is not written on gs://."""
    (directory / "checksums.json").unlink()
    path = directory / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"custom_metadata": {}}))


def test_a_checkpoint_without_checksums_is_read_and_its_items_are_checked(workdir):
    newest = workdir / "checkpoints" / "9"
    without_checksums(newest)
    assert restored(workdir)[0].step == 9
    shorten(largest(newest / "params"))
    with pytest.raises(UserError, match=r"checkpoints/9 is damaged: it cannot be read \(.*step 6 before it is whole"):
        restored(workdir)
    shutil.rmtree(newest / "rest")
    with pytest.raises(UserError, match=r"checkpoints/9 is damaged: the item 'rest' is missing"):
        restored(workdir)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_damage(workdir, monkeypatch):
    """As by a run that saves beside this process: then the newest one there is by now is read."""
    reader = Checkpoints(workdir, read_only=True)
    newest, other = workdir / "checkpoints" / "9", workdir / "checkpoints" / "12"
    check = checksums.check

    def slow_check(directory, names, **options):
        if directory.name == "9":
            newest.rename(other)
        check(directory, names, **options)

    monkeypatch.setattr(checkpoint, "check", slow_check)
    params, step = reader.restore_params(state(0).params)
    reader.close()
    assert step == 12
    assert np.array_equal(params["w"], state(9).params["w"])


def test_a_checkpoint_that_is_removed_while_the_directory_is_opened(workdir, monkeypatch):
    manager, tries = ocp.CheckpointManager, []

    def opened(*args, **options):
        tries.append(1)
        if len(tries) == 1:
            raise FileNotFoundError(workdir / "checkpoints" / "6")
        return manager(*args, **options)

    monkeypatch.setattr(ocp, "CheckpointManager", opened)
    reader = Checkpoints(workdir, read_only=True)
    assert reader.restore_params(state(0).params)[1] == 9
    reader.close()


@pytest.mark.slow
def test_reading_beside_a_run_that_saves(tmp_path):
    """As often as both can, with the one checkpoint that is kept always about to be removed."""
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


def test_a_stream_refuses_another_number_of_processes(workdir):
    """As saved by three processes: nothing is damaged, and no earlier checkpoint would help."""
    place = workdir / "checkpoints" / "9" / "data" / "process_0-of-1.json"
    for index in range(3):
        shutil.copy(place, place.with_name(f"process_{index}-of-3.json"))
    place.unlink()
    checkpoints = Checkpoints(workdir)
    with pytest.raises(UserError, match=r"number of processes 3 -> 1\. Each process of a stream .*seqjax prepare"):
        checkpoints.restore(state(0), batches())
    checkpoints.close()
