"""The exception for users, whose message says what is wrong and how to fix it, and how commands report it."""

import contextlib
import difflib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

# The values of `OSError.errno` when a disk cannot be written any more.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


# The status of a process that ends because another one of its run was lost (EX_TEMPFAIL of sysexits.h): the same
# command, started again, goes on.
LOST = 75


class UserError(Exception):
    """An error that the user can fix. Commands print its message without a traceback and exit with status 2."""


class MissingPackageError(UserError):
    """The package that a tokenizer is made with is not installed."""


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
    """A context of a command: what the user can fix ends it with a line on stderr and status 2, an interrupt with 130.

    That is a `UserError`, a full disk, or a path that may not be read or written. Other errors keep their traceback.
    """
    try:
        yield
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        sys.exit(130)
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        _cannot_use(error)
    except BrokenPipeError:  # of `seqjax ... | head`: nobody reads on, and Python's own flush at exit would say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # as a shell shows SIGPIPE
    except OSError as error:
        if error.errno == errno.EROFS:
            _cannot_use(error)
        if error.errno not in DISK_FULL:
            raise
        sys.stderr.write(f"error: {error}. Free some disk space, then run the same command again.\n")
        sys.exit(2)


def _cannot_use(error: OSError) -> NoReturn:
    sys.stderr.write(f"error: {error}. Give another path, or change its permissions.\n")
    sys.exit(2)


def leave(status: int) -> NoReturn:
    """End this process at once.

    The usual end of Python destroys XLA's client, and a thread that still compiles then crashes: an interrupt ends the
    waiting for it, not the compilation.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_command(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Run a command's `main(argv)`, by default with the arguments of the process, and report errors to the user."""
    # Imported here so that raising errors needs no JAX.
    from kernels_pallas import cpu_compiler

    cpu_compiler.use_safe_fusions()  # before JAX starts
    if isinstance(sys.stdout, io.TextIOWrapper):  # Text that the locale cannot print is shown as \\xe9 and the like.
        sys.stdout.reconfigure(errors="backslashreplace")
    with reporting(), explained():
        try:
            main(sys.argv[1:] if argv is None else argv)
        except KeyboardInterrupt:
            sys.stderr.write("\nInterrupted.\n")
            leave(130)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A context in which errors of kernels and devices that the user can fix become a `UserError`."""
    # Imported here so that raising errors needs no JAX.
    import jax

    from kernels_pallas import BackendError

    try:
        yield
    except BackendError as error:
        fix = "Give another config.model.mixer.implementation; None takes the fastest that can."
        raise UserError(f"{str(error).rstrip('.')}. {fix}") from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"The memory of the device is not enough: {str(error).splitlines()[0]} Training needs less with a "
            "smaller config.train.per_device_batch_size (a larger config.train.accumulate, where that is set), a "
            "larger config.mesh.fsdp, or config.model.remat=full; "
            "`seqjax train --dry_run` with the same settings says how much."
        ) from error
