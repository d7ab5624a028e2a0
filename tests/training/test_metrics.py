"""`metrics.jsonl` across a resume."""

import os
from pathlib import Path

import pytest
from tensorboardX import record_writer
from tensorboardX.proto.event_pb2 import Event

from seqjax.errors import UserError
from seqjax.training.metrics import read
from seqjax.training.writers import Metrics


def write(workdir, steps, **options):
    with Metrics(workdir, tensorboard=False, **options) as writer:
        for step in steps:
            writer.write(step, {"train/loss": 1 / step, "mfu": None})
        return writer.position


def test_a_resumed_file_has_no_row_twice(tmp_path):
    position = write(tmp_path, [1, 2, 3])
    write(tmp_path, [4, 5], position=position)  # lost by a kill
    write(tmp_path, [4, 5, 6], position=position, step=3)
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert read(tmp_path)[2] == {"step": 3, "train/loss": 1 / 3, "mfu": None}, "every bit of a float"


def test_a_torn_line_is_cut_off(tmp_path):
    position = write(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "train/lo')
    assert [row["step"] for row in read(tmp_path)] == [1, 2]
    write(tmp_path, [3], position=position)
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3]


def test_a_lost_file_is_not_filled_with_zeros(tmp_path):
    write(tmp_path, [1], position=5000)
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(b'{"step": 1')


def test_rows_that_a_checkpoint_counts_on_and_that_are_lost_are_an_error(tmp_path):
    """Shortened, or overwritten by what a crash leaves. The rows that are there stay, and the message has a way out."""
    path = tmp_path / "metrics.jsonl"
    before = write(tmp_path, [1, 2])
    position = write(tmp_path, [3, 4], position=before)
    whole = path.read_bytes()
    for content in (whole[:-30], whole[:before], b"", whole[:before] + bytes(len(whole) - before)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"had {position} bytes of whole rows then, and has (no|\d)") as caught:
            write(tmp_path, [5], position=position, step=4)
        assert path.read_bytes() == content
        for way in ("Put back a copy", f"delete {tmp_path}/checkpoints/4", "move the file away"):
            assert way in str(caught.value)
    path.write_bytes(whole[:-30])
    write(tmp_path, [3], position=before, step=2)  # the second way
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3]
    path.rename(tmp_path / "elsewhere")
    write(tmp_path, [5], position=position, step=4)  # and the third
    assert [row["step"] for row in read(tmp_path)] == [5]


def test_rows_that_are_gone_are_named(tmp_path, caplog):
    position = write(tmp_path, [1, 2, 3])
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, [4], position=position, step=3)
    assert [row["step"] for row in read(tmp_path)] == [4]
    assert "metrics.jsonl is gone; the run goes on without the rows up to step 3." in caplog.text


def test_rows_are_synced_when_a_checkpoint_is_to_count_on_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    with Metrics(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"train/loss": 2.0})
        writer.sync()
        assert synced == [writer.position]


def test_rows_are_on_disk_at_once(tmp_path):
    """A process that is killed has lost nothing that it logged."""
    writer = Metrics(tmp_path, tensorboard=False)
    writer.write(1, {"train/loss": 2.0})
    assert read(tmp_path) == [{"step": 1, "train/loss": 2.0}]
    assert writer.position == (tmp_path / "metrics.jsonl").stat().st_size
    writer.close()


def test_tensorboard_gets_the_numbers(tmp_path):
    with Metrics(tmp_path) as writer:
        writer.write(7, {"train/loss": 2.0, "mfu": None})
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"train/loss" in content
    assert b"mfu" not in content


def test_a_resumed_run_hides_the_events_of_steps_that_it_repeats(tmp_path):
    with Metrics(tmp_path) as writer:
        writer.write(7, {"train/loss": 2.0})
    with Metrics(tmp_path, step=4) as writer:
        writer.write(5, {"train/loss": 1.0})
    first, second = (events_of(path) for path in sorted((tmp_path / "tensorboard").iterdir()))
    assert [event.step for event in first if event.HasField("summary")] == [7]
    begin, row = second[1:]  # after the version of the format
    assert begin.session_log.status == begin.session_log.START and begin.step == 5
    assert row.step == 5 and row.summary.value[0].simple_value == 1.0


def events_of(path):
    """Return the events of a file: each is a length of 8 bytes, 4 of a sum, the event, and 4 of a sum."""
    content, found = path.read_bytes(), []
    while content:
        length = int.from_bytes(content[:8], "little")
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def test_a_full_disk_ends_the_events_and_not_the_run(tmp_path, monkeypatch, caplog):
    """It is said once; more rows than any queue of a writer has places are written, and nothing waits."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(record_writer, "open_file", lambda path: full)
        with Metrics(tmp_path) as writer:
            for step in range(1, 40):
                writer.write(step, {"train/loss": 2.0})
    assert len(read(tmp_path)) == 39
    assert [record.getMessage() for record in caplog.records if "TensorBoard" in record.getMessage()] == [
        "TensorBoard's events are not written any more ([Errno 28] No space left on device); training goes on."
    ]
