"""Utilities of the commands: errors for the user, options, atomic files and a status line.

A `UserError` says what is wrong and how to fix it, and commands print it without a traceback. Options are written
`--name=value`. A file is written beside its destination, synced and renamed, so it is never left incomplete; `measure`
detects later changes to it.
"""

import argparse
import contextlib
import difflib
import errno
import io
import json
import logging as standard_logging
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import stat
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from absl import logging
from etils import epath

from seqjax.escape import message

# The values of `OSError.errno` when a disk cannot be written any more.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


# Exit status of a process whose run lost another process (EX_TEMPFAIL of sysexits.h): the same command resumes the run.
LOST = 75


class UserError(Exception):
    """An error that the user can fix. Commands print its message without a traceback and exit with status 2.

    Its message holds names, paths and other text of files; as text it has no control characters and no passwords.
    """

    def __str__(self) -> str:
        """Return the message."""
        return message(super().__str__())


class MissingPackageError(UserError):
    """The package that implements a tokenizer is not installed."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'X'? Known: a, b, c." as the end of a message about an unknown `word`."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(names)}."


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error of another package, or its kind if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Return a context that ends a command with one line on stderr and status 2 for user errors, 130 for an interrupt.

    User errors are a `UserError`, a full disk, or a path that may not be read or written. Other errors keep their
    traceback. Where nobody reads its output any more, as in `seqjax ... | head`, it ends with status 141.
    """
    _open_streams()
    logging.get_absl_logger().addFilter(_clean)
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        sys.exit(130)
    except (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        _cannot_use(error)
    except BrokenPipeError:
        sys.exit(141)  # as a shell shows SIGPIPE
    except OSError as error:
        if error.errno == errno.EROFS:
            _cannot_use(error)
        if error.errno not in DISK_FULL:
            raise
        sys.stderr.write(f"error: {message(error)}. Free some disk space, then run the same command again.\n")
        sys.exit(2)
    finally:
        _end_output()


def _clean(record: standard_logging.LogRecord) -> bool:
    """Remove control characters and passwords from a line of the log."""
    record.msg, record.args = message(record.getMessage()), ()
    return True


def _open_streams() -> None:
    """Give this process the streams that the shell closed (`2>&-`), and let stdout print what the locale cannot."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # the next file would get its number and its text
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - while it lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as \\xe9 and the like


def _end_output() -> None:
    """Write what stdout holds, or give it to nobody: Python's own flush at exit would report that it cannot."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _cannot_use(error: OSError) -> NoReturn:
    sys.stderr.write(f"error: {message(error)}. Give another path, or change its permissions.\n")
    sys.exit(2)


def leave(status: int) -> NoReturn:
    """End this process at once.

    Python's usual shutdown destroys XLA's client, and a thread that is still compiling then crashes: an interrupt ends
    the wait for it, not the compilation.
    """
    _end_output()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Return a context in which Ctrl-C ends the process at once, for imports.

    A `KeyboardInterrupt` in the middle of an import is a long traceback, or the crash of an extension that begins.
    """

    def end(number: int, frame: object) -> None:
        sys.stderr.write("\nInterrupted.\n")
        leave(130)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def use_safe_fusions() -> None:
    """Let XLA compile sums of products right on a CPU (kernels_pallas/cpu_compiler.py); call it before JAX starts."""
    # Imported here so that raising errors needs no JAX.
    from kernels_pallas import cpu_compiler

    cpu_compiler.use_safe_fusions()


def run_command(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Run a command's `main(argv)`, by default with the arguments of the process, and report errors to the user."""
    with ended_by_ctrl_c():
        use_safe_fusions()
        import jax  # noqa: F401 - `explained` needs it
    with reporting():
        try:
            with explained():
                _require_directory()
                main(sys.argv[1:] if argv is None else argv)
        except KeyboardInterrupt:
            sys.stderr.write("\nInterrupted.\n")
            leave(130)


def _require_directory() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("The directory that this command was started in was deleted; change to another one.") from None


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Return a context that turns kernel and device errors that the user can fix into a `UserError`.

    A Ctrl-C in a callback of MLIR, while JAX compiles, is a `RuntimeError` with its traceback as the text; it is turned
    back into a `KeyboardInterrupt`.
    """
    # Imported here so that raising errors needs no JAX.
    import jax

    from kernels_pallas import BackendError

    try:
        yield
    except BackendError as error:
        setting = "loss_implementation" if "cross_entropy" in str(error) else "mixer.implementation"
        fix = f"Give another config.model.{setting}; None takes the fastest that can."
        raise UserError(f"{str(error).rstrip('.')}. {fix}") from error
    except (AssertionError, RuntimeError) as error:
        if "\nKeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        if isinstance(error, jax.errors.JaxRuntimeError):
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"The memory of the device is not enough: {str(error).splitlines()[0]} Training needs less with a "
                "smaller config.train.per_device_batch_size (a larger config.train.accumulate, where that is set), a "
                "larger config.mesh.fsdp, or config.model.remat=full; "
                "`seqjax train --dry_run` with the same settings shows how much. Evaluation needs less with a smaller "
                "config.eval.batch_size, generation with a smaller --batch_size or --prefill_chunk, where it has them."
            ) from error
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if not platforms or _has_devices():
            raise
        raise UserError(
            f"JAX finds no device for JAX_PLATFORMS={platforms} ({first_line(error)}). Unset it, or install the "
            "driver and the JAX that it needs."
        ) from error


def _has_devices() -> bool:
    import jax

    try:
        return bool(jax.devices())
    except (AssertionError, RuntimeError):  # JAX asserts that it found a platform.
        return False


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s; `command_parser` makes one."""

    settings: Sequence[str] = ()  # groups of settings that the command takes as --config.GROUP.KEY=VALUE
    find: Callable[[str], list[str]] | None = None  # the full keys of the settings that end in a name

    def print_help(self, file: Any = None) -> None:
        """Print the help; raise `OSError` if it cannot be written, which argparse would not."""
        file = file or sys.stdout
        file.write(self.format_help())
        file.flush()

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` where argparse would print the usage and exit."""
        raise UserError(f"{message[:1].upper()}{message[1:]}. See `{self.prog} --help`.")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options; raise `UserError` for an invalid argument and show how to write it."""
        given = list(sys.argv[1:] if args is None else args)
        self._refuse_bare_word(given)
        found, rest = self.parse_known_args(given, namespace)
        if rest:
            raise UserError(self._stray(rest[0]))
        return found

    def _refuse_bare_word(self, given: Sequence[str]) -> None:
        """Raise `UserError` if the first word is not an option but, most likely, the value of the first one."""
        options = [option for action in self._actions[1:2] for option in action.option_strings]  # after --help
        if not given or not options or given[0].startswith("-") or any(w.startswith(options[0]) for w in given):
            return
        if not re.match(r"[\w.\[\]]+=", given[0]):  # `train.steps=3` already names its setting
            raise UserError(f"{given[0]}: write {options[0]}={given[0]}. See `{self.prog} --help`.")

    def _stray(self, word: str) -> str:
        name, equals, _ = word.lstrip("-").partition("=")
        rest = word.lstrip("-")
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        see = f"every argument is --NAME=VALUE; see `{self.prog} --help`."
        groups = self.settings
        if groups and name.removeprefix("config.").partition(".")[0].partition("[")[0] in groups and "." in name:
            example = "" if equals else "=VALUE"
            return f"{word}: write --config.{rest.removeprefix('config.')}{example}."
        if f"--{name}" in options and not word.startswith("--"):
            return f"{word}: write --{rest}{'' if equals else '=VALUE'}."
        keys = self.find(name) if self.find and word.startswith("--") else []
        if keys:
            ways = " or ".join(f"--config.{key}{equals}{rest.partition('=')[2]}" for key in keys)
            return f"{word}: write {ways}."
        close = difflib.get_close_matches(f"--{name}", options, n=1, cutoff=0.6) if word.startswith("-") else []
        if close:
            return f"{word}: there is no such option. Did you mean {close[0]}? {see[0].upper()}{see[1:]}"
        return f"{word}: {see}"


def command_parser(
    command: str,
    *,
    description: str | None,
    settings: Sequence[str] = (),
    find: Callable[[str], list[str]] | None = None,
) -> Parser:
    """Return the parser of `seqjax COMMAND`, which shows the same help as `python -m`.

    The lines of `description`, a module's docstring, stay as they are. `settings` lists the groups of settings that the
    command takes as `--config.GROUP.KEY=VALUE`, and `find` returns the full keys that end in a name. Both are for
    messages.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"seqjax {command}", description=description, formatter_class=formatter, allow_abbrev=False)
    parser.settings, parser.find = tuple(settings), find
    return parser


def find_in_current_directory() -> None:
    """Let Python find modules in the current directory, after installed ones, for a mixer or config of the user.

    Nothing else looks there: it may be a stranger's directory, with modules named like packages that are not installed.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def is_text(text: str) -> bool:
    """Return whether an argument can be written as UTF-8: bytes that the locale does not know are halves of pairs."""
    try:
        return bool(text.encode()) or not text
    except UnicodeEncodeError:
        return False


def words(text: str) -> list[str]:
    """Return the words of `a,b,c`, for an option that takes several."""
    return [word for word in text.split(",") if word]


READ_BYTES = 1 << 22


def cache_directory(given: str = "") -> Path:
    """Return the directory for files that seqjax can make or fetch again.

    This is `given`, the value of a setting, or else `seqjax` in XDG_CACHE_HOME or in `~/.cache`.
    """
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "seqjax"


def temporary_beside(path: Path) -> Path:
    """Return the name of a new temporary file beside `path`, unique among processes on all machines."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


TEMPORARY = re.compile(r"\..+\.([0-9a-f]{32}|\d+)\.tmp")


def remove_temporaries(directory: Path, *, below: bool = True) -> None:
    """Remove the temporary files in and `below` a directory that a process left when it was killed.

    These are files of this user with a name that `temporary_beside` makes, or earlier versions made.
    """
    for leftover in directory.rglob(".*.tmp") if below else directory.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            found = leftover.lstat()
            is_own = found.st_uid == os.getuid() if hasattr(os, "getuid") else True
            if TEMPORARY.fullmatch(leftover.name) and stat.S_ISREG(found.st_mode) and is_own:
                leftover.unlink()


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Return a context that opens a new binary file, which replaces `path` if the context ends without an error.

    After an error, of a full disk for instance, nothing of the new file is left.
    """
    path = Path(path)
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: str | Path, value: Any, *, sort_keys: bool = False) -> None:
    """Write `value` as indented JSON, atomically."""
    with replacing(path) as file:
        file.write(as_json(value, sort_keys=sort_keys))


def as_json(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return `value` as the text that `write_json` writes."""
    return (json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode()


def measure(path: str | Path | epath.Path) -> tuple[int, int]:
    """Return the length in bytes and the CRC-32 of a file."""
    size = crc = 0
    with (Path(path) if isinstance(path, str) else path).open("rb") as file:
        while chunk := file.read(READ_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


LOG_SECONDS = 30.0
UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


class StatusLine:
    """Shows a status line, and permanent lines above it."""

    def __init__(self, *, stream: io.TextIOBase | None = None, quiet: bool = False, log_seconds: float = LOG_SECONDS):
        # A notebook shows stderr as if it were an error.
        self._stream = stream or (sys.stdout if "ipykernel" in sys.modules else sys.stderr)
        self._quiet, self._between = quiet, log_seconds
        self._shown = -float("inf")
        self._width = 0
        self.live = self._stream.isatty()

    def show(self, text: str, *, last: bool = False) -> None:
        """Rewrite the line; a log skips it shortly after another status line, unless it is the `last`."""
        now = time.monotonic()
        if self._quiet or (not self.live and not last and now - self._shown < self._between):
            return
        self._shown, text = now, message(text)
        if self.live:
            self._write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._write(text + "\n")

    def say(self, text: str) -> None:
        """Print a permanent line above the status line."""
        if self._quiet:
            return
        if self.live and self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0
        self._write(message(text) + "\n")

    def _write(self, text: str) -> None:
        """Write to the stream, or to nobody from when its reader has gone: that is no reason to stop what goes on."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            with Path(os.devnull).open("wb") as nobody:
                os.dup2(nobody.fileno(), self._stream.fileno())


def duration(seconds: float) -> str:
    """Format a number of seconds: 75 -> '1m15s'."""
    minutes, s = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{s:02d}s" if minutes else f"{s}s"


def size(n_bytes: int) -> str:
    """Format a number of bytes: 1536 -> '1.50 KiB'."""
    unit, name = next(((1 << bits, name) for bits, name in UNITS if n_bytes >= 1 << bits), (1, "B"))
    return f"{n_bytes / unit:.2f} {name}" if unit > 1 else f"{n_bytes} B"


def end_with_parent() -> None:
    """Let this process, which `multiprocessing` started, exit when its parent has ended, even if it was killed.

    A process that is killed cannot stop its workers, and each of them holds hundreds of megabytes.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
