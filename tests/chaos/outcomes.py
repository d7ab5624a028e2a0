"""Run commands for `tests.chaos.attacks` in forks or as processes, and classify how they end."""

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
LIMIT_SECONDS = 150.0  # much longer than any command takes

for module, _ in cli.COMMANDS.values():  # forks share the imports
    importlib.import_module(module)


class Ended(NamedTuple):
    """A finished process; the status is None if it did not end in time."""

    status: int | None
    stdout: str
    stderr: str


@dataclasses.dataclass
class Process:
    """A command in a fork of this process or as `python -m seqjax`, with its output in files."""

    pid: int
    log: Path
    status: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, seconds: float = LIMIT_SECONDS) -> Ended:
        """Wait for the end; after `seconds`, kill the process and its children."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        status = self.status
        if status is None:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        out, err = (
            self.log.with_suffix(name).read_text(encoding="utf-8", errors="replace") for name in (".out", ".err")
        )
        return Ended(status, out, err)


def start(
    argv: Sequence[str],
    log: Path,
    *,
    as_process: bool = False,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    setup: Callable[[], Any] | None = None,
) -> Process:
    """Start `seqjax ARGV`; the new process calls `setup` first, which may end it instead."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    files = [os.open(log.with_suffix(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in (".out", ".err")]
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        return Process(pid, log)
    status, has_begun = 1, False
    try:
        os.setsid()
        for stream, file in enumerate(files, start=1):
            os.dup2(file, stream)
            os.close(file)
        os.chdir(cwd or log.parent)
        for name, value in (env or {}).items():
            os.environ.pop(name, None)
            os.environ |= {name: value} if value is not None else {}
        if setup is not None:
            setup()
        if as_process:
            os.execv(sys.executable, [sys.executable, "-m", "seqjax", *argv])
        has_begun = True
        cli.run(list(argv))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        if has_begun:
            traceback.print_exc()
        else:  # a signal before the command started
            status = 130
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def call_in_fork(function: Callable[[], Any], log: Path) -> Any:
    """Call a function in a fork, because JAX must not start here; return its JSON value or the error text."""

    def answer() -> None:
        try:
            value = function()
        except BaseException as error:
            value = f"{type(error).__name__}: {error}"
        log.with_suffix(".json").write_text(json.dumps(value))
        os._exit(0)

    log.with_suffix(".json").unlink(missing_ok=True)
    ended = start([], log, setup=answer).wait()
    path = log.with_suffix(".json")
    return json.loads(path.read_text()) if path.is_file() else f"no answer: {ended}"


def accepted_names(file: str) -> tuple[str, ...]:
    """Return names that an error about a damaged file may use: the file or a parent directory."""
    path = Path(file)
    parts = [part for part in path.parts[1:] if part not in (".",)]
    return (path.name, *parts) if parts else (path.name,)


def classify(ended: Ended, words: Sequence[str]) -> tuple[str, str]:
    """Return the class of an end and the reason; an error line must contain one of the words, if any."""
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


def classify_disturbed(ended: Ended) -> tuple[str, str]:
    """Return the class and reason for the end of a disturbed command."""
    if ended.status is None:
        return "hang", ended.stderr[-300:]
    if "Traceback" in ended.stderr:
        return "traceback", ended.stderr[-1500:]
    fine = (0, 130, 141, *(-number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP)))
    if ended.status not in (*fine, -signal.SIGPIPE, 128 + signal.SIGTERM):
        return "unclear", f"status {ended.status}: {ended.stderr[-600:]}"
    return "clean", ""


def difference(actual: Any, expected: Any, path: str = "") -> str:
    """Return the first difference of two JSON values, with its key path."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        for key in sorted(actual.keys() | expected.keys()):
            if actual.get(key) != expected.get(key):
                return difference(actual.get(key), expected.get(key), f"{path}/{key}")
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            if a != b:
                return difference(a, b, f"{path}/{i}")
    return f"{path}: {str(actual)[:200]!r}, not {str(expected)[:200]!r}"
