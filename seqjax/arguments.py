"""The command lines of all commands, in one style: options are written `--name=value`, and errors name the fix."""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from seqjax.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `UserError`s; `command_parser` makes one."""

    settings: Sequence[str] = ()  # groups of settings that the command takes as --config.GROUP.KEY=VALUE

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` where argparse would print the usage and exit."""
        raise UserError(f"{message[:1].upper()}{message[1:]}. See `{self.prog} --help`.")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options; raise `UserError` for an argument that is none, with the way to write it."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            raise UserError(self._stray(rest[0]))
        return found

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
        close = difflib.get_close_matches(f"--{name}", options, n=1, cutoff=0.6) if word.startswith("-") else []
        if close:
            return f"{word}: there is no such option. Did you mean {close[0]}? {see[0].upper()}{see[1:]}"
        return f"{word}: {see}"


def command_parser(command: str, *, description: str | None, settings: Sequence[str] = ()) -> Parser:
    """Return the parser of `seqjax COMMAND`, which shows the same help as `python -m`.

    The lines of `description`, a module's docstring, stay as they are. `settings` are the groups of settings that the
    command takes as `--config.GROUP.KEY=VALUE`, for messages.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=f"seqjax {command}", description=description, formatter_class=formatter, allow_abbrev=False)
    parser.settings = tuple(settings)
    return parser


def words(text: str) -> list[str]:
    """Return the words of `a,b,c`, for an option that takes several."""
    return [word for word in text.split(",") if word]
