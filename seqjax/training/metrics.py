"""The output of a run while it trains: rows of metrics, a progress line, and errors for values that are not finite.

Rows go to `metrics.jsonl`, TensorBoard and Weights & Biases (`config.log.wandb=PROJECT`), in process 0 alone. The
workdir keeps the id of the run on Weights & Biases, so that a resumed run continues the same run there. The package
reads its own environment: `WANDB_MODE=offline` needs no account, `WANDB_ENTITY` names a team.
"""

import contextlib
import importlib
import io
import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from seqjax.config import Config, to_dict
from seqjax.data import EvalBlocks
from seqjax.escape import masked
from seqjax.models import flops
from seqjax.reading import Float, read_json, read_json_lines
from seqjax.training import eval_losses
from seqjax.training.checkpoint import DIRECTORY, Checkpoints, has_any
from seqjax.training.workdir import Mirror, device_peak_gib, readable
from seqjax.utils import StatusLine, UserError, duration, write_json


class WandbRun:
    """A run on Weights & Biases."""

    def __init__(self, workdir: Path, project: str, *, settings: dict[str, Any]):
        """Begin or resume the run of `workdir` in `project`; `settings` are those of the run.

        Raises `UserError` if the package is not installed or cannot begin a run.
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
        """Log the values measured at a step, unless an earlier process logged them before it was killed.

        A resumed run repeats the steps since its last checkpoint, with the same results.
        """
        if step >= self._run.step and not self._failed:
            try:
                self._run.log(values, step=step)
            except (OSError, self._error) as error:
                self._failed = True
                logging.warning("Nothing more goes to Weights & Biases (%s); training goes on.", error)

    def close(self) -> None:
        """Wait until everything is sent, or written in offline mode."""
        self._run.finish()


class Events:
    """Writes the events of TensorBoard; if that fails, it says so once, and the run goes on without them."""

    def __init__(self, directory: Path, *, step: int):
        """Begin a file in `directory`; TensorBoard no longer shows what earlier files have of steps after `step`."""
        # Imported here: it imports torch where that is installed, which takes longer than the rest of seqjax.
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        events: Any = event_pb2  # its names are made when it is imported
        self._file, self._event, self._scalar = None, events.Event, summary.scalar
        with self._if_it_works():
            directory.mkdir(exist_ok=True)
            # Not its SummaryWriter: that has a thread, and where its disk is full the thread ends and training waits.
            self._file = event_file_writer.EventsWriter(str(directory / "events"), f".after{step}")
            self._put(step + 1, session_log=events.SessionLog(status=events.SessionLog.START))
            self._file.flush()

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        """Write the values measured at a step."""
        with self._if_it_works():
            for name, value in values.items():
                self._put(step, summary=self._scalar(name, value))
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._if_it_works():
            if self._file is not None:
                self._file.close()

    def _put(self, step: int, **content: Any) -> None:
        if self._file is not None:
            self._file.write_event(self._event(step=step, wall_time=time.time(), **content))

    @contextlib.contextmanager
    def _if_it_works(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file = None
            logging.warning("TensorBoard's events are not written any more (%s); training goes on.", error)


class NullWriter:
    """Replaces `Metrics` in every process but the first, and writes nothing."""

    position = 0

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Metrics:
    """Appends objects to `jsonl`; checkpoints store `position`, to which a resumed run truncates the file.

    The rows that a killed process wrote after its last checkpoint are thus replaced, not repeated. The file is synced
    before a save (`sync`), so even after a power failure it holds the rows that the checkpoint relies on. If they are
    missing nevertheless, opening the file raises `UserError`; without any file the run starts a new one.
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
        elif position:  # moved away, as the error of `_require_rows` says, or lost
            logging.warning("%s is gone; the run goes on without the rows up to step %d.", self._path, step)
        self._file = self._path.open("ab")
        # Never extend the file: a lost one would come back as zeros.
        self._file.truncate(min(position, self._path.stat().st_size))
        self._wandb = wandb
        # Also at step 0: a process that was killed before its first checkpoint has left events too.
        self._events = Events(workdir / "tensorboard", step=step) if tensorboard else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append one object with the step and the values measured at it."""
        self._file.write((json.dumps({"step": step, **values}) + "\n").encode())
        self._file.flush()
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if self._events is not None:
            self._events.write(step, numbers)
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
        """The length of `jsonl` in bytes."""
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


# A value is None where the device does not report it.
ROW = {"step": int, "tokens?": int, "seconds?": float, str: (Float, None)}


def read(workdir: str | Path) -> list[dict[str, Any]]:
    """Return the objects of `jsonl`, up to a line that a crash left incomplete; raise `UserError` if it is damaged."""
    fix = "put back a copy of it, or remove the damaged lines"
    return read_json_lines(readable(workdir) / "metrics.jsonl", ROW, grows=True, fix=fix)


def require_checkpoint(mirror: Mirror) -> None:
    """Raise `UserError` if a run that has no checkpoint once had one: it would be trained again, over its results.

    A run that was killed before its first checkpoint was complete is not refused; it repeats its rows.
    """
    files = mirror.directory
    rows = read(mirror.directory) if (files / "metrics.jsonl").is_file() else []
    if not rows or has_any(str(mirror)):
        return
    every = read_json(files / "config.json", {"checkpoint": {"every": int}})["checkpoint"]["every"]
    finished = (files / "report.md").exists()
    # A save waits for the one before it, which is complete then.
    saved_twice = every and rows[-1]["step"] > 2 * every
    removed = not mirror.url and not (files / DIRECTORY).exists()  # it is made before the first step
    if finished or saved_twice or removed:
        raise UserError(
            f"{mirror} has results up to step {rows[-1]['step']} and no checkpoint to go on from, so training would "
            f"start again over them. Put back a copy of {mirror}/{DIRECTORY}, or train in another --workdir; to start "
            f"again here, move {mirror}/metrics.jsonl away."
        )


FILE = "wandb.json"


class ThroughputClock:
    """Measures steps per second between laps; `seconds` is the training time of the whole run across resumptions."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, step: int, *, seconds: float = 0.0) -> None:
        """Start the first lap after `step`."""
        self.seconds = seconds
        self._step, self._begin = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """End a lap at `step` and return its steps per second."""
        now = time.perf_counter()
        elapsed, steps = now - self._begin, step - self._step
        self.seconds += elapsed
        self._begin, self._step = now, step
        return steps / elapsed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in this context."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._begin += time.perf_counter() - begin


class Progress:
    """Shows the progress of a training run on the terminal."""

    def __init__(self, total: int, *, quiet: bool = False, stream: io.TextIOBase | None = None):
        self._total = total
        self._line = StatusLine(stream=stream, quiet=quiet)

    def update(self, step: int, *, loss: float, tokens_per_s: float, mfu: float | None, eta: float) -> None:
        """Show the progress; `eta` is in seconds."""
        parts = [f"step {step}/{self._total}", f"loss {loss:.3f}", f"{tokens_per_s:,.0f} tokens/s"]
        parts += [f"MFU {mfu:.1%}"] if mfu is not None else []
        self._line.show(" | ".join([*parts, f"ETA {duration(eta)}"]), last=step >= self._total)

    def say(self, text: str) -> None:
        """Print a permanent line above the progress line."""
        self._line.say(text)


class TrainLog:
    """Counts steps and writes rows; every process has one, but only that of process 0 (`lead`) writes and prints.

    A checkpoint stores its `state`. This is the length of `jsonl`, to which a resumed run truncates it, the sum and
    number of training losses since the last evaluation, and the training time so far in seconds.
    """

    def __init__(self, workdir: Path, config: Config, *, end: int, lead: bool, flops_per_token: float):
        """Log the steps up to `end`."""
        self.clock = ThroughputClock()
        self._workdir, self._config, self._lead = workdir, config, lead
        self._flops_per_token = flops_per_token
        self._tokens_per_step = config.train.batch_size * config.train.seq_len
        self._end = end
        self._progress = Progress(end, quiet=not lead)
        self._writer = NullWriter()
        self._loss_sum, self._loss_count = 0.0, 0

    def start(self, step: int, state: dict[str, Any] | None, blocks: dict[str, EvalBlocks]) -> None:
        """Start after `step`, with the `state` stored in the checkpoint of that step (None for a new run)."""
        state = state or {"metrics": 0, "window": [0.0, 0], "seconds": 0.0}
        self._loss_sum, self._loss_count = state["window"]
        self.clock.start(step, seconds=state["seconds"])
        if self._lead:
            project = self._config.log.wandb
            self._writer = Metrics(
                self._workdir,
                position=state["metrics"],
                step=step,
                tensorboard=self._config.log.tensorboard,
                wandb=WandbRun(self._workdir, project, settings=_public(to_dict(self._config))) if project else None,
            )
            eval_losses.start(self._workdir, blocks, step=step)

    @property
    def state(self) -> dict[str, Any]:
        """The state that `start` resumes from, in JSON-compatible types."""
        return {
            "metrics": self._writer.position,
            "window": [self._loss_sum, self._loss_count],
            "seconds": self.clock.seconds,
        }

    def sync(self) -> None:
        """Wait until all rows are on the disk; a checkpoint with `state` relies on them."""
        self._writer.sync()

    def say(self, text: str) -> None:
        """Print a line on the terminal."""
        self._progress.say(text)

    def step(self, step: int, values: dict[str, float]) -> None:
        """Add the loss of a step; every `log.every` steps and at the last one, write a row and show the progress."""
        self._loss_sum += values["loss"]
        self._loss_count += 1
        if step % self._config.log.every and step != self._end:
            return
        rate = self.clock.lap(step) * self._tokens_per_step
        mfu = flops.mfu(rate, self._flops_per_token)
        row = {
            "tokens": step * self._tokens_per_step,
            "train/loss": values["loss"],
            "train/grad_norm": values["grad_norm"],
            "train/param_norm": values["param_norm"],
            "train/lr": values["lr"],
            "tokens_per_s": rate,
            "mfu": mfu,
            "seconds": self.clock.seconds,
            "device_peak_gib": device_peak_gib(),
        }
        self._writer.write(step, row)
        eta = (self._end - step) * self._tokens_per_step / rate
        self._progress.update(step, loss=values["loss"], tokens_per_s=rate, mfu=mfu, eta=eta)

    def evaluation(self, step: int, row: dict[str, float], losses: dict[str, np.ndarray]) -> None:
        """Write the row of an evaluation, with the mean training loss since the last one, and every block's loss."""
        train_loss = self._loss_sum / self._loss_count if self._loss_count else math.nan
        self._loss_sum, self._loss_count = 0.0, 0
        self._writer.write(step, {"tokens": step * self._tokens_per_step, "train/loss": train_loss, **row})
        if self._lead:
            eval_losses.write(self._workdir, step, losses)
        text = ", ".join(f"{name} {row[f'eval/{name}/loss']:.3f}" for name in losses)
        self.say(f"step {step}: train {train_loss:.3f} | {text}")

    def __enter__(self) -> "TrainLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()


def _public(settings: Any) -> Any:
    """Return settings without the passwords in their URLs."""
    if isinstance(settings, dict):
        return {key: _public(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [_public(value) for value in settings]
    return masked(settings) if isinstance(settings, str) else settings


def not_finite(
    step: int, values: dict[str, float], batch: np.ndarray, *, mirror: Mirror, checkpoints: Checkpoints
) -> UserError:
    """Save the batch that produced non-finite values, and return the error that names the files."""
    path = mirror.directory / f"not_finite_step{step}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, tokens=batch)
    mirror.push(say=logging.warning)
    checkpoints.wait()
    last = checkpoints.latest
    kept = f"The checkpoint of step {last} is good" if last is not None else "No checkpoint was made before"
    logging.error("not finite at step %d: %s", step, values)
    return UserError(
        f"Step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}, parameter norm "
        f"{values['param_norm']}. Batch {step} of the data order was written to {path}. {kept}. Lower "
        "config.optim.lr, clip harder (config.optim.clip_norm), or warm up longer, in a new --workdir."
    )


def check_evaluation(step: int, row: dict[str, float]) -> None:
    """Raise `UserError` for a loss that is not finite although the parameters are: the model overflows on some text."""
    losses = {name: value for name, value in row.items() if name.startswith("eval/") and name.endswith("/loss")}
    if not all(map(math.isfinite, losses.values())):
        raise UserError(
            f"Step {step}: the evaluation gave {losses}. The parameters are finite, so the model overflows "
            "on text it has not seen: lower config.optim.lr, in a new --workdir."
        )
