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
    "train": ("seqjax.main", "train a model, or go on with a run"),
    "evaluate": ("seqjax.evaluate", "the loss of a run in every domain"),
    "generate": ("seqjax.generate", "continue a text with the model of a run"),
    "prepare": ("seqjax.data.prepare.__main__", "convert text to blocks of tokens"),
    "judge": ("seqjax.study.judge.__main__", "does a mixer cost base capabilities, and how fast is it: one sentence"),
    "study": ("seqjax.study.__main__", "train several runs and compare them at equal loss"),
    "recall": ("seqjax.evals.recall.__main__", "what small models of every mixer look up and track"),
    "harness": ("seqjax.evals.lm_eval.__main__", "a model in the tasks of lm-evaluation-harness"),
    "niah": ("seqjax.evals.niah", "does a model find one number in a long text"),
    "repeats": ("seqjax.evals.repeats", "does a model use a passage that it has read before"),
    "convert": ("seqjax.convert.__main__", "Hugging Face models in and out"),
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
            "`seqjax COMMAND --help` lists the options of a command; `seqjax --version` names the version.",
            "Begin with: seqjax train --config=top1_chunk",
            "",
        ]
    )


def run(argv: list[str] | None = None) -> None:
    """Run the command given by the arguments.

    This is the entry point of `seqjax` and `python -m seqjax`.
    """
    given = sys.argv[1:] if argv is None else argv
    name, rest = (given[0], given[1:]) if given else ("--help", [])
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
