"""The `seqjax` command, which dispatches to the modules in `COMMANDS`.

A command's module is imported when it runs, so `seqjax --help` answers at once.
"""

import importlib
import sys
from typing import Any

import seqjax
from seqjax.command_line import reporting, run_command
from seqjax.errors import UserError, nearest
from seqjax.terminal import ended_by_ctrl_c

# Command -> module and summary. Each module has a `main(argv)` and also runs as `python -m MODULE`.
COMMANDS = {
    "train": ("seqjax.main", "train a model, or resume a run"),
    "evaluate": ("seqjax.evaluate", "measure a run's loss in each domain"),
    "generate": ("seqjax.generate", "continue a text with a run's model"),
    "prepare": ("seqjax.data.prepare.__main__", "convert text to token blocks"),
    "judge": ("seqjax.study.judge.__main__", "does a mixer cost base capabilities, and how fast is it?"),
    "study": ("seqjax.study.__main__", "train several runs and compare them at equal in-domain loss"),
    "recall": ("seqjax.evals.recall.__main__", "test lookup and state tracking with small models"),
    "harness": ("seqjax.evals.lm_eval.__main__", "run lm-evaluation-harness tasks"),
    "niah": ("seqjax.evals.niah", "does a model find a number in a long text?"),
    "repeats": ("seqjax.evals.repeats", "does a model use a passage that it has read before?"),
    "convert": ("seqjax.convert.__main__", "import and export Hugging Face models"),
}


def usage() -> str:
    """Return the text of `seqjax --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: seqjax COMMAND [--NAME=VALUE ...]",
            "",
            *lines,
            "",
            "`seqjax COMMAND --help` lists the options of a command; `seqjax --version` prints the version.",
            "Start with: seqjax train --config=top1_chunk",
            "",
        ]
    )


def run(argv: list[str] | None = None) -> None:
    """Run the command given by the arguments.

    This is the entry point of `seqjax` and `python -m seqjax`.
    """
    words = sys.argv[1:] if argv is None else argv
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    with reporting():
        if name in ("-h", "--help", "help"):
            sys.stdout.write(usage())
            return
        if name in ("-V", "--version", "version"):
            sys.stdout.write(f"seqjax {seqjax.__version__}\n")
            return
        if name not in COMMANDS:
            raise UserError(f"There is no command {name!r}.{nearest(name, COMMANDS)}")

    run_command(lambda arguments: _module(name).main(arguments), rest)


def _module(name: str) -> Any:
    """Return a command's module; raise `UserError` if a package is missing.

    Packages are missing after `pip install --no-deps`, for example.
    """
    try:
        with ended_by_ctrl_c():
            return importlib.import_module(COMMANDS[name][0])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "seqjax", "kernels_pallas"):
            raise
        raise UserError(
            f"The package {package} is not installed. The commands need all dependencies of seqjax: install it without "
            "--no-deps. (kernels_pallas alone needs jax and jaxtyping.)"
        ) from error


if __name__ == "__main__":
    run()
