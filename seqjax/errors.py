"""Errors that a user can fix; commands print them without a traceback."""

import difflib
from collections.abc import Iterable

from seqjax.escape import message


class UserError(Exception):
    """An error that the user can fix: its message gives the problem and the fix.

    Commands print the message without a traceback and exit with status 2. A message may quote names, paths and file
    contents, so `str` removes control characters and passwords.
    """

    def __str__(self) -> str:
        """Return the message without control characters and passwords."""
        return message(super().__str__())


class MissingPackageError(UserError):
    """A tokenizer's package is not installed."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'X'? Known: a, b, c." to end a message about `word`."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(names)}."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, numpy or XLA ran out of memory.

    XLA reports this in two ways on a CPU.
    """
    text = str(error)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory allocating" in text


def first_line(error: BaseException) -> str:
    """Return the first line of a package's error, or its type without a message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
