"""Parse options and report errors for all commands.

Options have the form `--name=value`. A `UserError` becomes one line on stderr and exit status 2.
"""

import argparse
import contextlib
import difflib
import errno
import logging as standard_logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import logging

from seqjax.errors import UserError, first_line, is_out_of_memory
from seqjax.escape import message
from seqjax.files import DISK_FULL
from seqjax.terminal import end_output, ended_by_ctrl_c, leave, open_streams

# Exit status when a run has lost a process (EX_TEMPFAIL in sysexits.h): the same command resumes the run.
LOST = 75


# Values of `OSError.errno` for a path that a command cannot use.
CANNOT_USE = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
)


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Return a context that reports a command's errors and sets its exit status.

    User errors become one line on stderr and status 2: a `UserError`, a full disk, or a path without access. An
    interrupt exits with status 130. Other errors keep their traceback. If the reader of the output has closed it, as in
    `seqjax ... | head`, the status is 141.
    """
    open_streams()
    logging.get_absl_logger().addFilter(_clean)
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except SystemExit as error:
        if where := _outside(traceback.extract_tb(error.__traceback__)):
            _ended_by(where, repr(error))
            sys.exit(2)
        raise
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)  # a shell's status for SIGPIPE
    except OSError as error:
        if error.errno in CANNOT_USE:
            _cannot_use(error)
        if error.errno not in DISK_FULL:
            raise
        sys.stderr.write(f"error: {message(error)}. Free some disk space, then run the same command again.\n")
        sys.exit(2)
    finally:
        end_output()


def _clean(record: standard_logging.LogRecord) -> bool:
    """Remove control characters and passwords from a log line."""
    record.msg, record.args = message(record.getMessage()), ()
    return True


@contextlib.contextmanager
def _reporting_exit() -> Iterator[None]:
    """Return a context in which a user's `os._exit` gives an error and status 2.

    It would end the command without a message, perhaps with status 0. Forked processes may call it.
    """
    usual, own = os._exit, os.getpid()

    def end(status):  # without types, so that a type checker at run time adds no frame to the stack
        if os.getpid() == own and (where := _outside(traceback.extract_stack()[:-1])):
            _ended_by(where, f"os._exit({status})")
            leave(2)
        usual(status)

    os._exit = end
    try:
        yield
    finally:
        os._exit = usual


def _ended_by(where: str, how: str) -> None:
    sys.stderr.write(f"error: {where}: it ended this process ({how}). Remove that call.\n")


def _outside(stack: traceback.StackSummary | list[traceback.FrameSummary]) -> str:
    """Return the user's file and line that ended the process, the last in the stack.

    Returns "" for seqjax or argparse.
    """
    # Python's `exit` and `quit` are functions in `_sitebuiltins`.
    frames = [f for f in stack if "_sitebuiltins" not in f.filename]
    file, own = Path(frames[-1].filename), (Path(__file__).parent, Path(argparse.__file__))
    return "" if any(map(file.is_relative_to, own)) else message(f"{file}, line {frames[-1].lineno}")


def _cannot_use(error: OSError) -> NoReturn:
    sys.stderr.write(f"error: {message(error)}. Give another path, or change its permissions.\n")
    sys.exit(2)


def use_safe_fusions() -> None:
    """Make XLA compile sums of products correctly on a CPU.

    Call it before JAX starts. See kernels_pallas/cpu_compiler.py.
    """
    # Imported here so that raising errors needs no JAX.
    from kernels_pallas import cpu_compiler

    cpu_compiler.use_safe_fusions()


def run_command(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Run a command's `main(argv)` and report errors.

    `argv` defaults to the process arguments.
    """
    with ended_by_ctrl_c():
        use_safe_fusions()
        import jax  # noqa: F401 - `explained` needs it
    with reporting(), _reporting_exit():
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
        raise UserError("The current directory was deleted; change to another directory.") from None


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn kernel and device errors that the user can fix into a `UserError`.

    A Ctrl-C in an MLIR callback, while JAX compiles, is a `RuntimeError` with the traceback as its text. It is turned
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
    except (AssertionError, RuntimeError, MemoryError) as error:
        if "\nKeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        if isinstance(error, jax.errors.JaxRuntimeError | MemoryError):
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"The device is out of memory: {first_line(error)} In training, lower "
                "config.train.per_device_batch_size (or, if you set config.train.accumulate, raise it), raise "
                "config.mesh.fsdp, or set config.model.remat=full (`seqjax train --dry_run` shows the memory); in "
                "evaluation, lower config.eval.batch_size; in generation, lower --batch_size or --prefill_chunk."
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
    except (AssertionError, RuntimeError):  # JAX asserts that a platform exists.
        return False


class Parser(argparse.ArgumentParser):
    """A parser that raises `UserError`, created by `command_parser`."""

    settings: Sequence[str] = ()  # setting groups that the command takes as --config.GROUP.KEY=VALUE
    find: Callable[[str], list[str]] | None = None  # name -> full keys of the settings that end in it

    def print_help(self, file: Any = None) -> None:
        """Print the help; raise `OSError` if it cannot be written, unlike argparse."""
        file = file or sys.stdout
        file.write(self.format_help())
        file.flush()

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError`; argparse would print the usage and exit."""
        raise UserError(f"{message[:1].upper()}{message[1:]}. See `{self.prog} --help`.")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options.

        Raises a `UserError` that shows the right form for an invalid argument.
        """
        arguments = list(sys.argv[1:] if args is None else args)
        self._refuse_bare_word(arguments)
        options, rest = self.parse_known_args(arguments, namespace)
        if rest:
            raise UserError(self._stray(rest[0]))
        return options

    def _refuse_bare_word(self, arguments: Sequence[str]) -> None:
        """Raise `UserError` if the first word is probably the value of the first option."""
        options = [option for action in self._actions[1:2] for option in action.option_strings]  # after --help
        if (
            not arguments
            or not options
            or arguments[0].startswith("-")
            or any(w.startswith(options[0]) for w in arguments)
        ):
            return
        if not re.match(r"[\w.\[\]]+=", arguments[0]):  # `train.steps=3` already names its setting
            raise UserError(f"{arguments[0]}: write {options[0]}={arguments[0]}. See `{self.prog} --help`.")

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
    """Return the parser of `seqjax COMMAND`; `python -m` shows the same help.

    `description`, a module docstring, keeps its line breaks. `settings` lists the setting groups that the command takes
    as `--config.GROUP.KEY=VALUE`. `find` returns the full keys that end in a name. Both are used in messages.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"seqjax {command}", description=description, formatter_class=formatter, allow_abbrev=False)
    parser.settings, parser.find = tuple(settings), find
    return parser


def words(text: str) -> list[str]:
    """Return the words of `a,b,c`, for an option with several values."""
    return [word for word in text.split(",") if word]
