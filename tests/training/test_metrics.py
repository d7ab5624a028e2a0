"""`metrics.jsonl` and TensorBoard events across a resume."""

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


def test_resume_writes_each_row_once(tmp_path):
    position = write(tmp_path, [1, 2, 3])
    write(tmp_path, [4, 5], position=position)  # lost by a kill
    write(tmp_path, [4, 5, 6], position=position, step=3)
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert read(tmp_path)[2] == {"step": 3, "train/loss": 1 / 3, "mfu": None}, "floats are exact"


def test_incomplete_last_line_is_dropped(tmp_path):
    position = write(tmp_path, [1, 2])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "train/lo')
    assert [row["step"] for row in read(tmp_path)] == [1, 2]
    write(tmp_path, [3], position=position)
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3]


def test_missing_file_is_not_zero_filled(tmp_path):
    write(tmp_path, [1], position=5000)
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(b'{"step": 1')


def test_missing_rows_before_the_checkpoint_are_an_error(tmp_path):
    """The file is truncated or zero-filled after a crash. It stays unchanged, and each remedy works."""
    path = tmp_path / "metrics.jsonl"
    earlier = write(tmp_path, [1, 2])
    position = write(tmp_path, [3, 4], position=earlier)
    intact = path.read_bytes()
    for content in (intact[:-30], intact[:earlier], b"", intact[:earlier] + bytes(len(intact) - earlier)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"metrics\.jsonl .*{position} bytes.* has (no|\d)") as caught:
            write(tmp_path, [5], position=position, step=4)
        assert path.read_bytes() == content
        for remedy in ("Put back", f"delete {tmp_path}/checkpoints/4", "file away"):
            assert remedy in str(caught.value)
    path.write_bytes(intact[:-30])
    write(tmp_path, [3], position=earlier, step=2)  # the second remedy
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3]
    path.rename(tmp_path / "elsewhere")
    write(tmp_path, [5], position=position, step=4)  # the third remedy
    assert [row["step"] for row in read(tmp_path)] == [5]


def test_missing_file_is_logged(tmp_path, caplog):
    position = write(tmp_path, [1, 2, 3])
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, [4], position=position, step=3)
    assert [row["step"] for row in read(tmp_path)] == [4]
    (record,) = caplog.records
    assert "metrics.jsonl" in record.getMessage() and "step 3." in record.getMessage()


def test_sync_covers_all_rows(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    with Metrics(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"train/loss": 2.0})
        writer.sync()
        assert synced == [writer.position]


def test_rows_are_written_immediately(tmp_path):
    """A killed process loses no logged row."""
    writer = Metrics(tmp_path, tensorboard=False)
    writer.write(1, {"train/loss": 2.0})
    assert read(tmp_path) == [{"step": 1, "train/loss": 2.0}]
    assert writer.position == (tmp_path / "metrics.jsonl").stat().st_size
    writer.close()


def test_tensorboard_logs_only_numbers(tmp_path):
    with Metrics(tmp_path) as writer:
        writer.write(7, {"train/loss": 2.0, "mfu": None})
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"train/loss" in content
    assert b"mfu" not in content


def test_resume_hides_events_of_repeated_steps(tmp_path):
    with Metrics(tmp_path) as writer:
        writer.write(7, {"train/loss": 2.0})
    with Metrics(tmp_path, step=4) as writer:
        writer.write(5, {"train/loss": 1.0})
    first, second = (read_events(path) for path in sorted((tmp_path / "tensorboard").iterdir()))
    assert [event.step for event in first if event.HasField("summary")] == [7]
    begin, row = second[1:]  # after the format version
    assert begin.session_log.status == begin.session_log.START and begin.step == 5
    assert row.step == 5 and row.summary.value[0].simple_value == 1.0


def read_events(path):
    """Return a file's events. A record is an 8-byte length, a 4-byte CRC, the event and a 4-byte CRC."""
    content, events = path.read_bytes(), []
    while content:
        length = int.from_bytes(content[:8], "little")
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return events


def test_full_disk_stops_events_but_not_metrics(tmp_path, monkeypatch, caplog):
    """The failure is logged once. More rows than a writer's queue holds are written without blocking."""
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(record_writer, "open_file", lambda path: full)
        with Metrics(tmp_path) as writer:
            for step in range(1, 40):
                writer.write(step, {"train/loss": 2.0})
    assert len(read(tmp_path)) == 39
    (record,) = (record for record in caplog.records if "TensorBoard" in record.getMessage())
    assert "[Errno 28] No space left on device" in record.getMessage()
