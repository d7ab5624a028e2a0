"""Follow the remedy in an error: an attempt fails, its message gives the remedy, the next attempt succeeds."""

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from seqjax.commands import cli
from seqjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Remedy:
    """An attempt that fails, and how to follow the advice in its error.

    Attributes:
        attempt: Called with a directory and `arguments`; raises an error.
        arguments: The arguments of the failing attempt.
        advice: A pattern in the message, with named groups for what a user reads in it.
        follow: Called with the directory and the match; mends files, or returns the arguments that change.
        start: Called first, with the directory and the monkeypatch fixture.
        error: The type of the error.
    """

    attempt: Callable[..., Any]
    arguments: Mapping[str, Any]
    advice: str
    follow: Callable[[Path, re.Match[str]], Any]
    start: Callable[[Path, pytest.MonkeyPatch], Any] = lambda root, patch: None
    error: type[Exception] = UserError


def follow(remedy: Remedy, root: Path, patch: pytest.MonkeyPatch) -> None:
    """Fail, read the remedy in the message, follow it and succeed."""
    remedy.start(root, patch)
    with pytest.raises(remedy.error) as error:
        remedy.attempt(root, **remedy.arguments)
    match = re.search(remedy.advice, message := str(error.value).replace("\n", " "))
    assert match, message
    changed = remedy.follow(root, match)
    remedy.attempt(root, **{**remedy.arguments, **(changed if isinstance(changed, dict) else {})})


def last(*values: Any) -> Any:
    """Return the value of the last of several calls."""
    return values[-1]


def write(path: Path, content: str) -> None:
    """Write a file and its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def command(text: str, **values: str) -> None:
    """Run a `seqjax` command of a message, with `values` for the words that the message leaves open."""
    for word, value in values.items():
        text = text.replace(word, value)
    words = shlex.split(text)
    assert words[0] == "seqjax"
    cli.run(words[1:])
