"""Trains a model: `seqjax train --config=top1_chunk[:SIZE[,REGIME][,key=value]] [--workdir=DIR]`.

`python -m seqjax.main` is the same. `--config` takes the name of a shipped config (`top1_chunk:debug`) or the path of a
config file (`mine.py:110m`). Without `--workdir` the run gets a new directory under `runs/`; an existing run is
resumed. Any setting can be overridden: `--config.train.steps=500`, `--config.model.mixer.window=None`, or
`--config.model.mixer[1].heads=4` of several mixers.
"""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from absl import logging

from seqjax import presets, settings_help, store
from seqjax.arguments import Parser, command_parser
from seqjax.config import Config, from_config_dict
from seqjax.config_parse import keys_named
from seqjax.errors import UserError, run_command

GROUPS = [field.name for field in dataclasses.fields(Config) if field.name not in ("name", "size")]


def parser() -> Parser:
    """Return the parser of the options that are not settings."""
    out = command_parser("train", description=__doc__, settings=GROUPS, find=find_settings)
    out.add_argument("--config", help="NAME_OR_FILE[:SIZE[,REGIME][,key=value ...]]")
    out.add_argument(
        "--workdir",
        type=store.location,
        help="directory of the run, also s3:// or gs://; by default a new one under runs/",
    )
    out.add_argument(
        "--distributed",
        action="store_true",
        help="one process of several: SLURM, TPU pods, or where JAX_COORDINATOR_ADDRESS and its like are set",
    )
    out.add_argument(
        "--dry_run", action="store_true", help="print parameters, tokens, memory and time of the run, and write nothing"
    )
    out.add_argument(
        "--devices", type=int, help="with --dry_run: describe the run on so many devices, which need not be here"
    )
    return out


def find_settings(name: str) -> list[str]:
    """Return the full keys of the settings whose last part is `name`: `optim.lr` for `lr`."""
    return keys_named(presets.read_config("transformer_pp"), name)


def main(argv: list[str]) -> None:
    """Read the config, choose the workdir and train."""
    remaining, overrides = split_overrides(argv)
    options = parser()
    if {"-h", "--help"} & {*remaining}:
        options.epilog = settings_help.text()
    given = options.parse_args(remaining)
    if not given.config:
        raise UserError(f"Say what to train: --config=top1_chunk. Shipped: {', '.join(presets.names())}.")
    logging.set_verbosity(logging.WARNING)  # Orbax logs thirty lines per save.
    if given.devices is not None and (given.distributed or not given.dry_run):
        raise UserError(
            "--devices describes those of a --dry_run, in one process. Training takes every device that JAX sees; "
            "CUDA_VISIBLE_DEVICES hides some."
        )
    if given.distributed:
        join_processes()
        if not given.workdir:
            raise UserError("--distributed needs --workdir: a directory that all processes share.")
    else:
        require_one_process(os.environ)
    config = from_config_dict(presets.read_config(given.config, overrides))
    # Imported here so that --help and a typo are answered at once.
    if given.dry_run:
        from seqjax.dry_run import describe, described_devices

        devices = None if given.devices is None else described_devices(given.devices)
        for line in describe(config, given.workdir, devices):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        return
    from seqjax.train import train
    from seqjax.training import workdir as workdirs

    # The default is set here, not in the environment, so that a laptop without a cache directory still starts.
    if jax.default_backend() != "cpu":
        # Accelerators save minutes; CPU programs compile in seconds, and a cached one is tied to the exact machine.
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "seqjax" / "xla"))
        jax.config.update("jax_compilation_cache_dir", cache)
    workdir = given.workdir or workdirs.fresh(config)
    try:
        train(config, workdir)
    except Exception:
        if given.workdir is None and not (workdir / "config.json").exists():  # ended before its first step
            shutil.rmtree(workdir, ignore_errors=True)
        raise


def require_one_process(environment: Mapping[str, str]) -> None:
    """Raise `UserError` if SLURM started several tasks, each of which would train the whole model by itself.

    SLURM_STEP_NUM_TASKS counts the tasks of an `srun`, SLURM_NTASKS those of the job. In a batch script, which is one
    process of a job that may have several tasks, what the user means is unknown, so it is refused as well.
    """
    text = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    if text.isdecimal() and int(text) > 1:
        raise UserError(
            f"SLURM has {text} tasks here, and each would train by itself. Give --distributed and --workdir to train "
            "one model in all of them; for one process, start it with `srun --ntasks=1` or unset SLURM_NTASKS."
        )


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


if __name__ == "__main__":
    run_command(main)
