"""The one exception that users are meant to see: its text says what is wrong and what to do about it."""

import difflib
import errno
import sys
from collections.abc import Callable, Iterable

# What an OSError says when a disk takes nothing more.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


class UserError(Exception):
    """Something the user can mend. The commands print its text without a traceback and exit with status 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?) Known: a, b, c.' for an unknown `word`: the ending of every such message."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(names)}."


def run_command(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Run a command's `main(argv)`; a `UserError` or a full disk becomes a line on stderr and exit status 2."""
    from kernels_pallas import cpu_compiler  # not above: this module imports nothing, and what raises needs no jax

    cpu_compiler.use_safe_fusions()  # before JAX starts
    try:
        main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        sys.stderr.write(f"error: {error}. Free some disk space, then run the same command again.\n")
        sys.exit(2)
