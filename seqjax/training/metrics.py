"""The rows that a run writes: `metrics.jsonl`, TensorBoard and Weights & Biases."""

import json
import os
from pathlib import Path
from typing import Any

from seqjax.errors import UserError
from seqjax.training.mirror import readable
from seqjax.training.wandb_run import WandbRun


class NullWriter:
    """Takes the place of `Metrics` in every process but the first, and writes nothing."""

    position = 0

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Metrics:
    """Appends objects to `metrics.jsonl`; checkpoints store `position`, to which a resumed run truncates the file.

    The rows that a killed process wrote after its last checkpoint are thus replaced, not repeated. The file is synced
    before a save (`sync`), so even after a power failure it holds the rows that the checkpoint counts on. If they are
    gone nevertheless, opening the file raises `UserError`; without any file the run goes on with a new one.
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
        self._file = self._path.open("ab")
        # Never extend the file: a lost one would come back as zeros.
        self._file.truncate(min(position, self._path.stat().st_size))
        self._wandb = wandb
        # Also at step 0: a process that was killed before its first checkpoint has left events too.
        self._events = None
        if tensorboard:
            # Here, because it imports torch where that is installed, which takes longer than the rest of seqjax.
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append one object with the step and the values measured at it."""
        self._file.write((json.dumps({"step": step, **values}) + "\n").encode())
        self._file.flush()
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.write(step, numbers)

    def _require_rows(self, position: int, step: int) -> None:
        """Raise `UserError` unless the first `position` bytes of the file are there and end a row."""
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            file.seek(max(0, position - 1))
            whole = size >= position and (position == 0 or file.read(1) == b"\n")
        if not whole:
            lost = f"has {size} bytes" if size < position else "has no end of a row there"
            raise UserError(
                f"{self._path} is not what the checkpoint of step {step} counts on: it had {position} bytes of whole "
                f"rows then, and {lost} now. Put back a copy of it; or delete {self._path.parent}/checkpoints/{step} "
                "to go on from the checkpoint before, whose rows may all be there; or move the file away to go on "
                f"without the rows up to step {step}."
            )

    @property
    def position(self) -> int:
        """The length of `metrics.jsonl` in bytes."""
        return self._file.tell()

    def sync(self) -> None:
        """Wait until all rows are on the disk, where a power failure cannot reach them."""
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


def read(workdir: str | Path) -> list[dict[str, Any]]:
    """Return the objects of `metrics.jsonl`, up to a line that a crash left incomplete."""
    rows = []
    with (readable(workdir) / "metrics.jsonl").open(encoding="utf-8") as file:
        for line in file:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows
