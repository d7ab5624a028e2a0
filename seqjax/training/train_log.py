"""The log of a training run: metric rows, throughput and the progress line."""

import contextlib
import io
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.config import Config, to_dict
from seqjax.data import EvalBlocks
from seqjax.models import flops
from seqjax.terminal import StatusLine, duration
from seqjax.training import eval_losses
from seqjax.training.provenance import device_peak_gib
from seqjax.training.writers import Metrics, NullWriter, WandbRun, without_passwords


class ThroughputClock:
    """Measures steps per second between laps.

    `seconds` is the training time of the whole run, summed over resumed processes.
    """

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
        """Show the progress; `loss` is this step's training loss, `eta` is in seconds."""
        parts = [f"step {step}/{self._total}", f"training loss {loss:.3f} nats/token", f"{tokens_per_s:,.0f} tokens/s"]
        parts += [f"MFU {mfu:.1%}"] if mfu is not None else []
        self._line.show(" | ".join([*parts, f"ETA {duration(eta)}"]), last=step >= self._total)

    def say(self, text: str) -> None:
        """Print a permanent line above the progress line."""
        self._line.say(text)


class TrainLog:
    """Counts steps and writes rows; only process 0 (`lead`) writes and prints.

    A checkpoint stores its `state`: the length of `metrics.jsonl` (a resumed run truncates to it), the sum and number
    of training losses since the last evaluation, and the training seconds so far.
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
        """Start after `step` with its checkpoint's `state` (None for a new run)."""
        state = state or {"metrics": 0, "window": [0.0, 0], "seconds": 0.0}
        self._loss_sum, self._loss_count = state["window"]
        self.clock.start(step, seconds=state["seconds"])
        if self._lead:
            project, wandb = self._config.log.wandb, None
            if project:
                wandb = WandbRun(self._workdir, project, settings=without_passwords(to_dict(self._config)))
            self._writer = Metrics(
                self._workdir,
                position=state["metrics"],
                step=step,
                tensorboard=self._config.log.tensorboard,
                wandb=wandb,
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
        """Wait until all rows are on the disk; checkpoints rely on them."""
        self._writer.sync()

    def say(self, text: str) -> None:
        """Print a line on the terminal."""
        self._progress.say(text)

    def step(self, step: int, values: dict[str, float]) -> None:
        """Add a step's loss.

        Every `log.every` steps and at the end, a row is written and the progress is shown.
        """
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
            **{f"train/{name}": value for name, value in values.items() if name.startswith("auxiliary_")},
            "tokens_per_s": rate,
            "mfu": mfu,
            "seconds": self.clock.seconds,
            "device_peak_gib": device_peak_gib(),
        }
        self._writer.write(step, row)
        eta = (self._end - step) * self._tokens_per_step / rate
        self._progress.update(step, loss=values["loss"], tokens_per_s=rate, mfu=mfu, eta=eta)

    def evaluation(self, step: int, row: dict[str, float], losses: dict[str, np.ndarray]) -> None:
        """Write the row and the block losses of an evaluation.

        The row gets the mean training loss since the last evaluation.
        """
        train_loss = self._loss_sum / self._loss_count if self._loss_count else math.nan
        steps = self._loss_count
        self._loss_sum, self._loss_count = 0.0, 0
        self._writer.write(step, {"tokens": step * self._tokens_per_step, "train/loss": train_loss, **row})
        if self._lead:
            eval_losses.write(self._workdir, step, losses)
        text = ", ".join(f"{name} {row[f'eval/{name}/loss']:.3f}" for name in losses)
        since = f" | training loss {train_loss:.3f}, mean of the last {steps:,} steps" if steps else ""
        self.say(f"step {step}: evaluation loss in nats/token {text}{since}")

    def __enter__(self) -> "TrainLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()
