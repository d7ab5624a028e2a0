"""Write metrics to `metrics.jsonl`, TensorBoard and Weights & Biases.

Only process 0 writes. The workdir keeps the Weights & Biases run id, so a resumed run continues there. The package
reads environment variables: `WANDB_MODE=offline` needs no account, and `WANDB_ENTITY` sets a team.
"""

import contextlib
import importlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from seqjax.errors import UserError
from seqjax.escape import masked
from seqjax.files import write_json
from seqjax.reading import read_json


class WandbRun:
    """A run on Weights & Biases."""

    def __init__(self, workdir: Path, project: str, *, settings: dict[str, Any]):
        """Start or resume the W&B run of `workdir` in `project`.

        `settings` is the config to show. Raises `UserError` if the package is not installed or cannot start a run.
        """
        try:
            # Imported here: it takes a second, and only process 0 of a run that logs to W&B needs it.
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise UserError(
                f"config.log.wandb={project!r} needs the package: pip install 'seqjax[wandb]', or set "
                "config.log.wandb=None."
            ) from None
        path = workdir / FILE
        if not path.exists():
            write_json(path, {"id": uuid.uuid4().hex[:12]})
        run_id = read_json(path, {"id": str}, fix="delete it to begin another run there")["id"]
        self._error, self._failed = wandb.Error, False
        try:
            self._run = wandb.init(
                project=project,
                id=run_id,
                resume="allow",  # a new run, or the run with this id
                name=workdir.absolute().name,
                dir=str(workdir),
                config=settings,
            )
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases did not begin a run ({error}). Log in with `wandb login`, set WANDB_MODE=offline, "
                "or set config.log.wandb=None."
            ) from error

    def write(self, step: int, values: dict[str, int | float]) -> None:
        """Log the values of a step, unless a killed process already logged them.

        A resumed run repeats the steps since its last checkpoint, with the same results.
        """
        if step >= self._run.step and not self._failed:
            try:
                self._run.log(values, step=step)
            except (OSError, self._error) as error:
                self._failed = True
                logging.warning("Logging to Weights & Biases has stopped (%s); training continues.", error)

    def close(self) -> None:
        """Wait until everything is sent, or written in offline mode."""
        self._run.finish()


class Events:
    """Writes TensorBoard events.

    The first failure is reported and ends them, and the run continues.
    """

    def __init__(self, directory: Path, *, step: int):
        """Start a file in `directory`.

        TensorBoard hides earlier files' events after `step`.
        """
        # Imported here: it imports torch if installed, which takes longer than the rest of seqjax.
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        events: Any = event_pb2  # protobuf creates the members at import
        self._file, self._event, self._scalar = None, events.Event, summary.scalar
        with self._until_failure():
            directory.mkdir(exist_ok=True)
            # Not SummaryWriter: on a full disk its thread ends, and training waits for it.
            self._file = event_file_writer.EventsWriter(str(directory / "events"), f".after{step}")
            self._put(step + 1, session_log=events.SessionLog(status=events.SessionLog.START))
            self._file.flush()

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Write the values measured at a step."""
        with self._until_failure():
            for name, value in values.items():
                self._put(step, summary=self._scalar(name, value))
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._until_failure():
            if self._file is not None:
                self._file.close()

    def _put(self, step: int, **content: Any) -> None:
        if self._file is not None:
            self._file.write_event(self._event(step=step, wall_time=time.time(), **content))

    @contextlib.contextmanager
    def _until_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file = None
            logging.warning("Writing TensorBoard events has stopped (%s); training continues.", error)


class NullWriter:
    """Replaces `Metrics` in all processes except the first, and writes nothing."""

    position = 0

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Metrics:
    """Appends rows to `metrics.jsonl`.

    Checkpoints store `position`, the length to resume from. A resumed run truncates the file to `position`, so rows
    after the last checkpoint are replaced, not repeated. The file is synced before a save (`sync`). Even after a power
    failure it therefore holds the rows that the checkpoint relies on. If rows are missing nevertheless, opening the
    file raises `UserError`. If the file is missing, the run starts a new one.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        position: int = 0,
        step: int = 0,
        tensorboard: bool = True,
        wandb: WandbRun | None = None,
    ):
        self._path = workdir / "metrics.jsonl"
        if self._path.exists():
            self._require_rows(position, step)
        elif position:  # lost, or moved away as the error in `_require_rows` suggests
            logging.warning("%s is missing; the run continues without the rows up to step %d.", self._path, step)
        self._file = self._path.open("ab")
        # Never extend the file: lost rows would become zeros.
        self._file.truncate(min(position, self._path.stat().st_size))
        self._wandb = wandb
        # Also at step 0: a process killed before its first checkpoint may have left events.
        self._events = Events(workdir / "tensorboard", step=step) if tensorboard else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append a row with the step and its values."""
        self._file.write((json.dumps({"step": step, **values}) + "\n").encode())
        self._file.flush()
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if self._events is not None:
            self._events.write(step, numbers)
        if self._wandb is not None:
            self._wandb.write(step, numbers)

    def _require_rows(self, position: int, step: int) -> None:
        """Raise `UserError` unless the first `position` bytes exist and end with a row."""
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            file.seek(max(0, position - 1))
            is_intact = size >= position and (position == 0 or file.read(1) == b"\n")
        if not is_intact:
            fault = f"has {size} bytes" if size < position else "has no row end there"
            raise UserError(
                f"{self._path} has lost rows: the checkpoint of step {step} needs the first {position} bytes, but the "
                f"file {fault}. Put back a copy of it; or delete {self._path.parent}/checkpoints/{step} to resume from "
                f"the previous checkpoint; or move the file away to resume without the rows up to step {step}."
            )

    @property
    def position(self) -> int:
        """The length of `metrics.jsonl` in bytes."""
        return self._file.tell()

    def sync(self) -> None:
        """Wait until all rows are on the disk, safe from a power failure."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.close()


FILE = "wandb.json"


def without_passwords(settings: Any) -> Any:
    """Return settings without the passwords in their URLs."""
    if isinstance(settings, dict):
        return {key: without_passwords(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [without_passwords(value) for value in settings]
    return masked(settings) if isinstance(settings, str) else settings
