"""The exception for users, whose message says what is wrong and how to fix it, and how commands report it."""

import contextlib
import difflib
import errno
import sys
from collections.abc import Callable, Iterable, Iterator

# The values of `OSError.errno` when a disk cannot be written any more.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


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
        sys.stderr.write(f"error: {error}. Give another path, or change its permissions.\n")
        sys.exit(2)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        sys.stderr.write(f"error: {error}. Free some disk space, then run the same command again.\n")
        sys.exit(2)


def run_command(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Run a command's `main(argv)`, by default with the arguments of the process, and report errors to the user."""
    from kernels_pallas import cpu_compiler  # imported here so that raising errors needs no JAX

    cpu_compiler.use_safe_fusions()  # before JAX starts
    with reporting():
        main(sys.argv[1:] if argv is None else argv)
