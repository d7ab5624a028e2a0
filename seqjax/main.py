"""Trains a model: `python -m seqjax.main --config=configs/top1_chunk.py[:SIZE[,REGIME][,key=value]] [--workdir=DIR]`.

`--config` takes the path of a config file, or the name of a shipped one (`--config=top1_chunk:debug`). Without
`--workdir` the run gets a new directory under `runs/`; an existing run is resumed. Any setting can be overridden:
`--config.train.steps=500`, `--config.model.mixer.window=None`, or `--config.model.mixer[1].heads=4` of several mixers.
"""

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags, logging

from seqjax import presets
from seqjax.config import from_config_dict
from seqjax.errors import UserError, run_command
from seqjax.train import train
from seqjax.training import workdir as workdirs

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; empty = a new one under runs/.")
DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "One process of several (SLURM, TPU pods, or JAX_COORDINATOR_ADDRESS and its like are set)."
)
CONFIG = flags.DEFINE_string(
    "config", None, "A file with get_config(arg) or a shipped config's name, as FILE.py[:ARG]; --config.KEY=VALUE sets."
)


def main(argv: list[str], *, overrides: Sequence[tuple[str, str]] = ()) -> None:
    """Read the config, apply `overrides` (key, text), choose the workdir and train."""
    if len(argv) > 1:
        raise UserError(f"{' '.join(argv[1:])}: every argument is --NAME=VALUE; see --help.")
    if not CONFIG.value:
        raise UserError(f"Say what to train: --config=configs/top1_chunk.py. Shipped: {', '.join(presets.names())}.")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax logs thirty lines per save.
    if DISTRIBUTED.value:
        join_processes()
        if not WORKDIR.value:
            raise UserError("--distributed needs --workdir: a directory that all processes share.")
    config = from_config_dict(presets.read_config(CONFIG.value, overrides))
    # The default is set here, not in the environment, so that a laptop without a cache directory still starts.
    if jax.default_backend() != "cpu":
        # Accelerators save minutes; CPU programs compile in seconds, and a cached one is tied to the exact machine.
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "seqjax" / "xla"))
        jax.config.update("jax_compilation_cache_dir", cache)
    workdir = Path(WORKDIR.value) if WORKDIR.value else workdirs.fresh(config)
    train(config, workdir)


def join_processes() -> None:
    """Join the other processes as the environment, SLURM or the TPU's metadata describes; else raise `UserError`."""
    count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(
            num_processes=int(count) if count else None, process_id=int(index) if index else None
        )
    except ValueError as error:
        raise UserError(
            f"--distributed: {error} Start under SLURM or on a TPU pod, or set JAX_COORDINATOR_ADDRESS=HOST:PORT, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID for every process."
        ) from error


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the arguments without `--config.KEY=VALUE` (or `--config.KEY VALUE`), and those as (key, text)."""
    remaining: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith(("--config.", "-config.")):
            remaining.append(word)
            continue
        following = value if equals else next(words, None)
        if following is None:
            raise UserError(f"{word} has no value: write {word}=VALUE.")
        overrides.append((name.partition("config.")[2], following))
    return remaining, overrides


def run() -> None:
    """Run the command; the entry point of `python -m seqjax.main`."""

    def command(argv: list[str]) -> None:
        remaining, overrides = split_overrides(argv)
        train_with = functools.partial(main, overrides=overrides)
        app.run(lambda positional: run_command(train_with, positional), argv=[sys.argv[0], *remaining])

    run_command(command)


if __name__ == "__main__":
    run()
