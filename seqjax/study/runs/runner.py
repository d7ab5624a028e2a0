"""Train a study's runs, several at a time, in one process per run and GPU.

A failed run is reported; the other runs continue. After a signal, no further run starts and the active runs receive the
signal, so each saves its state. The same command resumes them.
"""

import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from seqjax.config import Config
from seqjax.errors import UserError
from seqjax.reading import read_json
from seqjax.terminal import duration, tell
from seqjax.training import metrics, schedule
from seqjax.training.checkpoint import has_checkpoint
from seqjax.training.mirrors import LOG, Mirror, readable

POLL_SECONDS = 1.0
REPORT_SECONDS = 30.0
# Form of config.json for runs that are only read, and of its copy in runs.json.
FORM = {"train?": {"ends?": [float], "steps?": int}, "data?": {"tokenizer?": str}, "eval?": {"classes?": bool}}
FORM |= {"model?": dict, "optim?": dict}


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold one run of a study; a run without a config is only read, never trained.

    `model`, `seed`, `rate` and `schedule` determine its comparison (seqjax/study/runs/studies.py).
    """

    index: int
    label: str
    workdir: str | Path  # a URL, or a directory
    config: Config | None
    model: str
    seed: int = 0
    rate: float = 1.0
    schedule: float = 1.0

    @property
    def complete(self) -> bool:
        """Whether training is finished.

        A run with ends needs an evaluation at each end, another run its final checkpoint.
        """
        if self.config is None:
            return True
        if self.config.train.ends:
            return not self.lacking
        return has_checkpoint(self.workdir, self.config.train.steps)

    @property
    def ends(self) -> list[int]:
        """The steps of the run's ends, ascending (seqjax/training/schedule.py).

        The list is empty for a linear schedule. A run that is only read has its ends in config.json.
        """
        if self.config is not None:
            return schedule.end_steps(self.config)
        path = self.files / "config.json"
        if not path.is_file() and (self.files / schedule.ENDS).is_dir():
            raise UserError(f"{path} is missing, and this run has ends: it holds their steps. Put back a copy of it.")
        train = read_json(path, FORM).get("train", {}) if path.is_file() else {}
        return schedule.steps_of_shares(train.get("ends", ()), steps=train.get("steps", 0))

    @property
    def lacking(self) -> list[int]:
        """The steps of ends without an evaluation."""
        files = readable(self.workdir)
        return [step for step in self.ends if not _is_evaluated(schedule.end_directory(files, step), step)]

    @property
    def progress(self) -> tuple[int, int]:
        """Trained steps and total steps, including every cooldown's steps."""
        assert self.config is not None, "a run that is only read has no steps to train"
        if not self.config.train.ends:
            return self.last_row().get("step", 0), self.config.train.steps
        done = total = 0
        trunk = _last_step(self.files)
        for segment in schedule.segments(self.config):
            at = _last_step(segment.directory(self.files)) if segment.is_cooldown else trunk
            done += min(max(at - segment.begin, 0), segment.end - segment.begin)
            total += segment.end - segment.begin
        return done, total

    @property
    def files(self) -> Path:
        """A local directory with the run's files: a copy if the workdir is in a store."""
        return readable(self.workdir, fresh_seconds=REPORT_SECONDS / 2)

    @property
    def log(self) -> Path:
        """The local file for the run process's output."""
        return Mirror(self.workdir).directory / LOG

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics rows that have a speed.

        Cooldowns come first, starting with the last end; the constant-rate part follows.
        """
        files = self.files
        directories = [*(schedule.end_directory(files, step) for step in reversed(self.ends)), files]
        return [row for directory in directories for row in _rows(directory)]

    def last_row(self) -> dict[str, Any]:
        """Return the row with the highest step, or {} without rows."""
        return max(self.rows(), key=lambda row: row.get("step", -1), default={})

    def tokens_per_s(self) -> float | None:
        """Return the median logged speed.

        The median ignores brief slowdowns from other work on the device.
        """
        speeds = [row["tokens_per_s"] for row in self.rows() if row["tokens_per_s"]]
        return statistics.median(speeds) if speeds else None


def _rows(directory: Path) -> list[dict[str, Any]]:
    rows = metrics.read(directory) if (directory / "metrics.jsonl").is_file() else []
    return [row for row in rows if "tokens_per_s" in row]


def _last_step(directory: Path) -> int:
    rows = _rows(directory)
    return rows[-1].get("step", 0) if rows else 0


def _is_evaluated(directory: Path, step: int) -> bool:
    rows = metrics.read(directory) if (directory / "metrics.jsonl").is_file() else []
    return any(row["step"] == step and any(key.startswith("eval/") for key in row) for row in rows)


def select(runs: list[Run], only: str) -> list[Run]:
    """Return the runs in `only`, in its order; all runs if it is empty.

    `only` has labels or indices, separated by semicolons. Raises `UserError` for an unknown run.
    """
    if not only:
        return runs
    by_name = {str(run.index): run for run in runs} | {run.label: run for run in runs}
    chosen = [name.strip() for name in only.split(";") if name.strip()]
    for name in chosen:
        if name not in by_name:
            known = ", ".join(f"{run.index} {run.label!r}" for run in runs)
            raise UserError(f"--only={name}: the study has no such run. Its runs: {known}.")
    return list({by_name[name].index: by_name[name] for name in chosen}.values())


def table(runs: list[Run], *, running: Collection[int] = (), failed: Collection[int] = ()) -> str:
    """Return a table with one progress line per run."""
    width = max(len(run.label) for run in runs)
    lines = []
    for run in runs:
        row = run.last_row()
        if run.config is None:
            state = "read only"
        elif run.complete:
            state = "complete"
        else:
            progress = "step {}/{}".format(*run.progress)
            state = "failed" if run.index in failed else progress if row or run.index in running else "not begun"
        speed = f"{row['tokens_per_s']:>10,.0f} tokens/s  loss {row['train/loss']:.3f}" if row else ""
        mark = "*" if run.index in running else " "
        lines.append(f"{mark}{run.index:>3}  {run.label:<{width}}  {state:<16}{speed}".rstrip())
    return "\n".join(lines)


def eta_seconds(runs: list[Run], *, jobs: int) -> float | None:
    """Return the seconds until all runs are complete; None without any speed.

    A run's speed is its newest logged speed; a run that has not begun has the mean speed.
    """
    speeds = {run.index: run.last_row().get("tokens_per_s") for run in runs}
    seen = [speed for speed in speeds.values() if speed]
    if not seen:
        return None
    total = 0.0
    for run in runs:
        if run.config is not None and not run.complete:
            done, steps = run.progress
            remaining = steps - done
            tokens = remaining * run.config.train.batch_size * run.config.train.seq_len
            total += tokens / (speeds[run.index] or sum(seen) / len(seen))
    return total / jobs


def visible_gpus() -> list[str]:
    """Return a CUDA_VISIBLE_DEVICES value per GPU.

    The driver is queried, so this process allocates no GPU memory.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return []
    return [str(i) for i, line in enumerate(listing.splitlines()) if line.startswith("GPU ")]


def train_all(
    study: str,
    runs: list[Run],
    *,
    jobs: int,
    may_stop: Callable[[Run], bool] = lambda run: False,
) -> list[Run]:
    """Train every incomplete run, `jobs` at a time, and return the failed runs.

    `may_stop` is called repeatedly. If it returns True for a run, the run is not started, or it saves and stops; it
    does not count as failed.

    Raises `UserError` if there are GPUs but fewer than `jobs`. Raises `KeyboardInterrupt` after a signal, once all runs
    have ended.
    """
    gpus = visible_gpus()
    if gpus and jobs > len(gpus):
        raise UserError(
            f"--jobs={jobs}, but this machine has {len(gpus)} GPUs and each run needs one. Give --jobs={len(gpus)}."
        )
    waiting = [run for run in runs if not run.complete]
    slots: list[str | None] = [*gpus[:jobs]] if gpus else [None] * jobs
    active: dict[int, tuple[Run, subprocess.Popen[bytes], str | None]] = {}
    failed: dict[int, Run] = {}
    dropped: set[int] = set()
    stopping: list[int] = []

    def stop(number: int, frame: object) -> None:
        del frame
        stopping.append(number)

    old_handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    last_report, n_forwarded = -float("inf"), 0
    try:
        while active or (waiting and not stopping):
            if stopping and n_forwarded < len(stopping):
                n_forwarded = len(stopping)
                for _, process, _ in active.values():
                    process.send_signal(signal.SIGTERM)
            for index, (run, process, _) in active.items():
                if index not in dropped and may_stop(run):
                    dropped.add(index)
                    process.send_signal(signal.SIGTERM)
            while waiting and slots and not stopping:
                run = waiting.pop(0)
                if may_stop(run):
                    dropped.add(run.index)
                    continue
                slot = slots.pop(0)
                active[run.index] = (run, _start(study, run, slot), slot)
            for index, (run, process, slot) in list(active.items()):
                if process.poll() is None:
                    continue
                process.communicate()  # closes the pipe
                del active[index]
                slots.append(slot)
                if index in dropped:
                    continue
                # A run that stopped early after a signal to its own process counts as failed, unless this study stops.
                if process.returncode != 0 or not (run.complete or stopping):
                    failed[index] = run
                    how = f"failed with status {process.returncode}" if process.returncode else "ended early"
                    tell(f"{run.label}: {how}; {_last_output(run)}")
            if time.monotonic() - last_report > REPORT_SECONDS:
                last_report = time.monotonic()
                eta = eta_seconds([run for run in runs if run.index not in dropped], jobs=jobs)
                eta_text = f", ETA {duration(eta)}" if eta is not None else ""
                done = sum(run.complete for run in runs)
                tell(f"{table(runs, running=set(active), failed=set(failed))}\n{done}/{len(runs)} complete{eta_text}\n")
                sys.stdout.flush()
            if active:
                time.sleep(POLL_SECONDS)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    if stopping:
        raise KeyboardInterrupt
    return list(failed.values())


def _start(study: str, run: Run, gpu: str | None) -> subprocess.Popen[bytes]:
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
    run.log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "seqjax.study.runs.train_run", f"--study={study}", f"--run={run.index}"]
    # Each run has a separate session, so Ctrl-C reaches it only once, as the signal that this process forwards. If this
    # process is killed, the pipe closes and the run stops.
    command.append("--stop_with_stdin")
    with run.log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _last_output(run: Run) -> str:
    path = run.log
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.is_file() else []
    return f"{path} ends: {lines[-1] if lines else 'nothing'}"
