"""Errors that a user can fix: they state the problem and the fix, and commands print them without a traceback."""

import difflib
from collections.abc import Iterable

from seqjax.escape import message


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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, numpy or XLA could not allocate memory; XLA says so in two ways on a CPU."""
    text = str(error)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory allocating" in text


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error of another package, or its kind if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
