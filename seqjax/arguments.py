"""The command lines of all commands, in one style: options are written `--name=value`, and errors name the fix."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from seqjax.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s; `command_parser` makes one."""

    settings: Sequence[str] = ()  # groups of settings that the command takes as --config.GROUP.KEY=VALUE
    find: Callable[[str], list[str]] | None = None  # the full keys of the settings that end in a name

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` where argparse would print the usage and exit."""
        raise UserError(f"{message[:1].upper()}{message[1:]}. See `{self.prog} --help`.")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options; raise `UserError` for an argument that is none, with the way to write it."""
        given = list(sys.argv[1:] if args is None else args)
        self._refuse_bare_word(given)
        found, rest = self.parse_known_args(given, namespace)
        if rest:
            raise UserError(self._stray(rest[0]))
        return found

    def _refuse_bare_word(self, given: Sequence[str]) -> None:
        """Raise `UserError` if the first word has no option; it is most likely the value of the command's first one."""
        options = [option for action in self._actions[1:2] for option in action.option_strings]  # after --help
        if not given or not options or given[0].startswith("-") or any(w.startswith(options[0]) for w in given):
            return
        if not re.match(r"[\w.\[\]]+=", given[0]):  # `train.steps=3` names what it is the value of
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

    The lines of `description`, a module's docstring, stay as they are. `settings` are the groups of settings that the
    command takes as `--config.GROUP.KEY=VALUE`, and `find` returns the full keys of those that end in a name: both are
    for messages.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"seqjax {command}", description=description, formatter_class=formatter, allow_abbrev=False)
    parser.settings, parser.find = tuple(settings), find
    return parser


def words(text: str) -> list[str]:
    """Return the words of `a,b,c`, for an option that takes several."""
    return [word for word in text.split(",") if word]
