"""What a run writes while it goes: `metrics.jsonl`, TensorBoard events, and a progress line on the terminal."""

import io
import json
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

from seqjax.terminal import StatusLine, duration

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
    """How far a training run is, on the terminal."""

    def __init__(self, total: int, *, quiet: bool = False, stream: io.TextIOBase | None = None):
        self._total = total
        self._line = StatusLine(stream=stream, quiet=quiet)

    def update(self, step: int, *, loss: float, tokens_per_s: float, mfu: float | None, eta: float) -> None:
        """Show where the run is; `eta` in seconds."""
        parts = [f"step {step}/{self._total}", f"loss {loss:.3f}", f"{tokens_per_s:,.0f} tokens/s"]
        parts += [f"MFU {mfu:.1%}"] if mfu is not None else []
        self._line.show(" | ".join([*parts, f"ETA {duration(eta)}"]), last=step >= self._total)

    def say(self, text: str) -> None:
        """A line that stays, above the progress line."""
        self._line.say(text)


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
