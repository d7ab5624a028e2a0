"""What a run writes while it goes: `metrics.jsonl`, TensorBoard events, and a progress line on the terminal."""

import io
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

# What depends on the clock and the device, not on the run: left out when two runs are compared.
TIMING = ("tokens_per_s", "mfu", "seconds", "device_peak_gib")


class NullWriter:
    """The writer of a process that follows, in place of `Metrics`: it writes nothing."""

    position = 0

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Metrics:
    """Appends objects to `metrics.jsonl`; `position` goes into checkpoints, and a resumed run truncates to it.

    So whatever a killed process wrote after its last checkpoint is written again, once.
    """

    def __init__(self, workdir: Path, *, position: int = 0, step: int = 0, tensorboard: bool = True):
        self._path = workdir / "metrics.jsonl"
        self._file = self._path.open("ab")
        # never longer: a file that was lost would come back as zeros
        self._file.truncate(min(position, self._path.stat().st_size))
        # also at step 0: a process that was killed before its first checkpoint has left events too
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1) if tensorboard else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One object: the step and whatever was measured at it."""
        self._file.write((json.dumps({"step": step, **values}) + "\n").encode())
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(name, value, step)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush and close both files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read(workdir: Path) -> list[dict[str, Any]]:
    """The objects of `metrics.jsonl`; a line torn by a crash ends the list."""
    rows = []
    with (workdir / "metrics.jsonl").open() as file:
        for line in file:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


class Progress:
    """One line that is rewritten on a terminal, and a plain line every half minute in a log file."""

    def __init__(
        self,
        total: int,
        *,
        quiet: bool = False,
        stream: io.TextIOBase | None = None,
        seconds_between_lines: float = 30.0,
    ):
        self._total = total
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._between = seconds_between_lines
        self._last = -float("inf")
        self._width = 0

    def update(self, step: int, *, loss: float, tokens_per_s: float, mfu: float | None, eta: float) -> None:
        """Show where the run is; `eta` in seconds."""
        now = time.monotonic()
        if self._quiet:
            return
        if not self._live and now - self._last < self._between and step < self._total:
            return
        self._last = now
        parts = [f"step {step}/{self._total}", f"loss {loss:.3f}", f"{tokens_per_s:,.0f} tokens/s"]
        parts += [f"MFU {mfu:.1%}"] if mfu is not None else []
        self._show(" | ".join([*parts, f"ETA {duration(eta)}"]))

    def _show(self, text: str) -> None:
        if self._live:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """A line that stays, above the progress line."""
        if self._quiet:
            return
        if self._live and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0
        self._stream.write(text + "\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """75 -> '1m15s'."""
    minutes, s = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{s:02d}s" if minutes else f"{s}s"


def device_peak_bytes() -> int | None:
    """Most memory that the first device of this process held since it began; None where it does not count."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def device_peak_gib() -> float | None:
    """`device_peak_bytes` in GiB."""
    peak = device_peak_bytes()
    return None if peak is None else peak / 2**30


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def run_facts(**extra: Any) -> dict[str, Any]:
    """What identifies a run: versions, device, commit."""
    packages = (
        "seqjax",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "numpy",
        "jax-triton",
        "triton",
    )
    here = Path(__file__).parent

    def git(*args: str) -> str:
        try:
            result = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=False)
        except FileNotFoundError:  # a container without git
            return ""
        return result.stdout.strip() if result.returncode == 0 else ""

    return {
        "python": platform.python_version(),
        "versions": installed_versions(packages),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "commit": git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else ""),
        **extra,
    }
