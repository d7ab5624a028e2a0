"""Train a model: `seqjax train --config=top1_chunk[:SIZE] [--workdir=DIR]`.

`python -m seqjax.main` is the same. `--config` takes a shipped config (`top1_chunk:debug`) or a config file
(`mine.py:110m`). Without `--workdir` the run gets a new directory under `runs/`. A `--workdir` that holds a run is
resumed. `--init_from=RUN` starts a new run with the weights in RUN. Any setting can be overridden:
`--config.train.steps=500`, `--config.model.mixer.window=None`, or for several mixers `--config.model.mixer[1].heads=4`.
"""

import argparse
import dataclasses
import functools
import os
import shutil
import sys
from collections.abc import Sequence

import jax
from absl import logging

from seqjax import store
from seqjax.command_line import Parser, command_parser
from seqjax.config import Config, from_config_dict, presets, settings
from seqjax.config.parse import keys_named
from seqjax.errors import UserError
from seqjax.escape import message
from seqjax.sharding import make_mesh
from seqjax.terminal import ended_by_ctrl_c
from seqjax.training.processes import START_SECONDS, banner, hosts, joined, require_one_process

GROUPS = [field.name for field in dataclasses.fields(Config) if field.name not in ("name", "size")]


def parser() -> Parser:
    """Return the parser of the options that are not settings."""
    out = command_parser("train", description=__doc__, settings=GROUPS, find=find_settings)
    out.add_argument("--config", help="NAME_OR_FILE[:SIZE[,REGIME][,key=value ...]]")
    out.add_argument(
        "--workdir",
        type=store.location,
        help="directory of the run, also gs://; by default a new one under runs/",
    )
    out.add_argument(
        "--init_from",
        metavar="RUN",
        help="start a new run with these weights: a run's --workdir, also gs://, or a public model's directory",
    )
    out.add_argument(
        "--distributed",
        action="store_true",
        help="train in several processes: SLURM, TPU pods, or with the next three options (or JAX's variables)",
    )
    out.add_argument("--coordinator_address", metavar="HOST:PORT", help="address of process 0, for all processes")
    out.add_argument("--num_processes", type=int, help="number of processes")
    out.add_argument("--process_id", type=int, help="the number of this process, from 0")
    out.add_argument(
        "--start_timeout",
        type=float,
        default=START_SECONDS,
        metavar="SECONDS",
        help="time for all processes to connect (60)",
    )
    out.add_argument(
        "--dry_run", action="store_true", help="print parameters, tokens, memory and time of the run, and write nothing"
    )
    out.add_argument("--devices", type=int, help="with --dry_run: simulate this number of devices")
    return out


def find_settings(name: str) -> list[str]:
    """Return the full keys of the settings that end in `name`: `optim.lr` for `lr`."""
    return keys_named(presets.read_config("transformer_pp"), name)


def main(argv: list[str]) -> None:
    """Read the config, choose the workdir and train."""
    remaining, overrides = split_overrides(argv)
    options = parser()
    if {"-h", "--help"} & {*remaining}:
        options.epilog = settings.help_text()
    args = options.parse_args(remaining)
    if not args.config:
        raise UserError(f"--config is missing, for example --config=top1_chunk. Shipped: {', '.join(presets.names())}.")
    logging.set_verbosity(logging.WARNING)  # Orbax logs thirty lines per save.
    explicit = (args.coordinator_address, args.num_processes, args.process_id)
    is_distributed = args.distributed or any(value is not None for value in explicit)
    if args.devices is not None and (is_distributed or not args.dry_run):
        raise UserError(
            "--devices simulates devices for --dry_run, in one process. Training takes every device that JAX sees; "
            "CUDA_VISIBLE_DEVICES hides some."
        )
    if not is_distributed:
        require_one_process(os.environ)
        run(args, overrides, is_distributed=False)
        return
    if not args.workdir:
        raise UserError("--distributed needs --workdir: a directory that all processes share, or gs://BUCKET/PATH.")
    with joined(*explicit, start_seconds=args.start_timeout):
        run(args, overrides, is_distributed=True)


def run(args: argparse.Namespace, overrides: list[tuple[str, str]], *, is_distributed: bool) -> None:
    """Train, or describe the run, as one process or as part of a distributed run."""
    lead = not is_distributed or jax.process_index() == 0
    config = from_config_dict(presets.read_config(args.config, overrides))
    if args.init_from is not None:
        args.init_from = str(store.location(args.init_from))
    # Imported here so that --help and typos are answered at once.
    if args.dry_run:
        from seqjax.training.dry_run import describe, simulated_devices

        devices = None if args.devices is None else simulated_devices(args.devices)
        weights = None
        if args.init_from:
            from seqjax.pretrained import describe_weights

            weights = functools.partial(describe_weights, args.init_from, config)
        for line in describe(config, args.workdir, devices, weights=weights):
            if lead:
                sys.stdout.write(message(line) + "\n")
                sys.stdout.flush()
        return
    with ended_by_ctrl_c():
        from seqjax.training import workdir as workdirs
        from seqjax.training.loop import train
        from seqjax.training.processes import use_compile_cache

        weights = None
        if args.init_from:
            from seqjax.pretrained import weights_of

            weights = weights_of(args.init_from)
    use_compile_cache()
    if is_distributed:
        mesh = make_mesh(**dataclasses.asdict(config.mesh))
        text = banner(hosts(), devices=mesh.devices.flat, axes=mesh.shape)
        sys.stderr.write(text + "\n" if lead else "")
    workdir = args.workdir or workdirs.fresh(config)
    try:
        train(config, workdir, weights=weights)
    except BaseException:  # also an interrupt
        if args.workdir is None and not (workdir / "config.json").exists():  # the run ended before its first step
            shutil.rmtree(workdir, ignore_errors=True)
        raise


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split `--config.KEY=VALUE` (or `--config.KEY VALUE`) off the arguments.

    Returns the remaining arguments, and the overrides as (key, text).
    """
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
