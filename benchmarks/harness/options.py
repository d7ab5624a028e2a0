"""Benchmark flags in one style: `--name=value`, lists with commas. Imports nothing heavy.

A script defines its flags before its other imports and calls `parse_early`, so that `--help` and a misspelt flag are
answered before JAX is loaded.
"""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from seqjax.errors import UserError, nearest

RECORDED = Path("benchmarks/results")
UNRECORDED = Path("runs/benchmarks")  # git ignores it


def flags(doc: str | None, *, quick: str = "", writes: bool = True) -> argparse.ArgumentParser:
    """Return a parser with a docstring as help, `--json` if the script writes, and `--quick` if it has a help text.

    Messages use the command `python -m ...` from the docstring.
    """
    prog = re.search(r"python -m [\w.]+", doc or "")
    parser = argparse.ArgumentParser(
        prog=prog[0] if prog else None,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if writes:
        parser.add_argument("--json", default="", help="path of the report; a plot goes next to it")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose configs and their size: mixers, size, batch, seq_len, remat."""
    several = "only these configs, a,b or a:x=1,y=2;b; all by default"
    parser.add_argument("--mixers", type=configs, default=[], help=several)
    parser.add_argument("--size", default="110m", help="size of the configs (110m)")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, with --devices on each (16)")
    parser.add_argument("--seq_len", type=int, default=2048, help="tokens per sequence (2048)")
    parser.add_argument("--remat", default="none", choices=["none", "full", "dots", "attention"], help="(none)")


def parse_early(parser: argparse.ArgumentParser, module: str) -> None:
    """Answer `--help` and refuse unknown flags if `module`, a `__name__`, is the main program."""
    if module == "__main__":
        parser.parse_args()


def words(text: str) -> list[str]:
    """Parse a list flag: "a,b" -> ["a", "b"]."""
    return [word for word in text.split(",") if word]


def configs(text: str) -> list[str]:
    """Parse a flag of configs: "a,b", or "a:x=1,y=2;b" if a config has several settings."""
    return labels(text) if ";" in text else words(text)


def labels(text: str) -> list[str]:
    """Parse a list of labels that may contain commas: "a, b;c" -> ["a, b", "c"]."""
    return [label.strip() for label in text.split(";") if label.strip()]


def integers(text: str) -> list[int]:
    """Parse a list of numbers: "1,2" -> [1, 2]."""
    return [int(word) for word in words(text)]


def check_known(flag: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UserError` for the first name of `names` that is not `known`."""
    known = list(known)
    for word in names:
        if word not in known:
            raise UserError(f"--{flag}={word} is unknown.{nearest(word, known)}")


def destination(json_path: str, name: str, *, recorded: bool) -> Path:
    """Return a report's path: `--json` if set; benchmarks/results for a complete run; otherwise runs/benchmarks."""
    return Path(json_path) if json_path else (RECORDED if recorded else UNRECORDED) / f"{name}.json"
