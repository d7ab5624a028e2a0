"""Runs commands for `tests.chaos.attacks` in forks or as processes, and sorts how they end."""

import dataclasses
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqjax.commands import cli

GOOD = ("clean", "one line")
BAD = ("unclear", "traceback", "silent", "hang")
LONGEST = 3  # lines of a message
LIMIT_SECONDS = 150.0  # far longer than any command takes

for module, _ in cli.COMMANDS.values():  # for all forks
    importlib.import_module(module)


class Ended(NamedTuple):
    """What a process left; the status is None if it did not end in time."""

    status: int | None
    stdout: str
    stderr: str


@dataclasses.dataclass
class Process:
    """A command, in a fork of this process or as `python -m seqjax`, its output in files."""

    pid: int
    place: Path
    status: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, seconds: float = LIMIT_SECONDS) -> Ended:
        """Wait for its end, and kill it and its children if it does not come."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        status = self.status
        if status is None:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        out, err = (
            self.place.with_suffix(name).read_text(encoding="utf-8", errors="replace") for name in (".out", ".err")
        )
        return Ended(status, out, err)


def start(
    argv: Sequence[str],
    place: Path,
    *,
    real: bool = False,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    before: Callable[[], Any] | None = None,
) -> Process:
    """Start `seqjax ARGV`, or a function in place of a command; `before` is called in the process, before it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    files = [os.open(place.with_suffix(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in (".out", ".err")]
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        return Process(pid, place)
    status, begun = 1, False
    try:
        os.setsid()
        for stream, file in enumerate(files, start=1):
            os.dup2(file, stream)
            os.close(file)
        os.chdir(cwd or place.parent)
        for name, value in (env or {}).items():
            os.environ.pop(name, None)
            os.environ |= {name: value} if value is not None else {}
        if before is not None:
            before()
        if real:
            os.execv(sys.executable, [sys.executable, "-m", "seqjax", *argv])
        begun = True
        cli.run(list(argv))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        if begun:
            traceback.print_exc()
        else:  # a signal that came before the command had begun
            status = 130
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def ask(function: Callable[[], Any], place: Path) -> Any:
    """The JSON value of a function, called in a fork so that JAX never starts here; an error's text if it fails."""

    def answer() -> None:
        try:
            value = function()
        except BaseException as error:
            value = f"{type(error).__name__}: {error}"
        place.with_suffix(".json").write_text(json.dumps(value))
        os._exit(0)

    place.with_suffix(".json").unlink(missing_ok=True)
    ended = start([], place, before=answer).wait()
    path = place.with_suffix(".json")
    return json.loads(path.read_text()) if path.is_file() else f"no answer: {ended}"


def names(file: str) -> tuple[str, ...]:
    """What a message about a damaged file may name: it, or a directory or the checkpoint that it lies in."""
    path = Path(file)
    parts = [part for part in path.parts[1:] if part not in (".",)]
    return (path.name, *parts) if parts else (path.name,)


def judged(ended: Ended, words: Sequence[str]) -> tuple[str, str]:
    """The class of an end, and why; a message must hold one of the words, if there are any."""
    if ended.status is None:
        return "hang", ended.stderr[-300:]
    if "Traceback" in ended.stderr:
        return "traceback", ended.stderr[-1500:]
    if ended.status == 0:
        return "clean", ""
    _, is_error, message = f"\n{ended.stderr.strip()}".rpartition("\nerror: ")
    if not is_error or ended.status != 2 or len(message.splitlines()) > LONGEST:
        return "unclear", f"status {ended.status}: {ended.stderr[-600:]}"
    if words and not any(word in message for word in words):
        return "unclear", f"names none of {', '.join(words)}: {message}"
    return "one line", message


def disturbed(ended: Ended) -> tuple[str, str]:
    """The class of the end of a command that was disturbed."""
    if ended.status is None:
        return "hang", ended.stderr[-300:]
    if "Traceback" in ended.stderr:
        return "traceback", ended.stderr[-1500:]
    fine = (0, 130, 141, *(-number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP)))
    if ended.status not in (*fine, -signal.SIGPIPE, 128 + signal.SIGTERM):
        return "unclear", f"status {ended.status}: {ended.stderr[-600:]}"
    return "clean", ""


def difference(made: Any, wanted: Any, path: str = "") -> str:
    """The first place at which two JSON values differ."""
    if isinstance(made, dict) and isinstance(wanted, dict):
        for key in sorted(made.keys() | wanted.keys()):
            if made.get(key) != wanted.get(key):
                return difference(made.get(key), wanted.get(key), f"{path}/{key}")
    if isinstance(made, list) and isinstance(wanted, list) and len(made) == len(wanted):
        for i, (a, b) in enumerate(zip(made, wanted, strict=True)):
            if a != b:
                return difference(a, b, f"{path}/{i}")
    return f"{path}: {str(made)[:200]!r}, not {str(wanted)[:200]!r}"
