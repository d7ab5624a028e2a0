"""Train: `python -m seqjax.main --config=configs/top1_chunk.py[:SIZE[,REGIME][,key=value]] [--workdir=DIR]`.

Without `--workdir` the run gets a fresh directory under `runs/`; with it, what is there goes on. Any setting can be
overridden: `--config.train.steps=500`.
"""

import itertools
import os
import sys
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from seqjax import workdir as workdirs
from seqjax.config import from_config_dict
from seqjax.errors import UserError, run_command
from seqjax.train import train

WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept; empty = a fresh one under runs/.")
DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "One process of several (SLURM, TPU pods, or JAX_COORDINATOR_ADDRESS and its like are set)."
)
CONFIG = config_flags.DEFINE_config_file("config", None, "A file with get_config(arg), as FILE.py[:ARG].")


def main(argv: list[str]) -> None:
    """Read the config, choose the workdir, train."""
    del argv
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells thirty things of every save
    if DISTRIBUTED.value:
        join_processes()
        if not WORKDIR.value:
            raise UserError("--distributed needs --workdir: a directory that all processes share.")
    # Looked up here, not in the environment, so that a laptop without a cache directory still starts.
    if jax.default_backend() != "cpu":
        # CPU programs compile in seconds, and a cached one is tied to the exact machine; accelerators gain minutes.
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "seqjax" / "xla"))
        jax.config.update("jax_compilation_cache_dir", cache)
    config = from_config_dict(CONFIG.value)
    workdir = Path(WORKDIR.value) if WORKDIR.value else workdirs.fresh(config)
    train(config, workdir)


def join_processes() -> None:
    """Meet the other processes: where the environment says, or where SLURM or the TPU's metadata does."""
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


def check_config_flag(argv: list[str]) -> None:
    """Say what is wrong with `--config` before the flag parser does, in words that name the fix."""
    pairs = [a.split("=", 1) for a in argv if a.startswith(("--config=", "-config="))]
    values = [value for _, value in pairs] + [b for a, b in itertools.pairwise(argv) if a in ("--config", "-config")]
    shipped = ", ".join(sorted(str(p) for p in Path("configs").glob("*.py") if p.stem not in ("__init__", "common")))
    known = f" Config files here: {shipped}." if shipped else " Run from the root of the repository."
    if not values:
        raise UserError(f"Say what to train: --config=configs/top1_chunk.py.{known}")
    path = Path(values[-1].split(":", 1)[0])
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"--config: there is no Python file {path}.{known}")


def parse_flags(argv: list[str]) -> list[str]:
    """The flag parser, with words for a setting after `--config.` that does not exist."""
    try:
        return app.parse_flags_with_usage(argv)
    except AttributeError as error:  # ml_collections' way to say it, with the nearest setting
        said = error.args[0].args[0] if error.args and isinstance(error.args[0], KeyError) else str(error)
        raise UserError(f"A flag --config.GROUP.SETTING=VALUE has no such setting: {' '.join(said.split())}") from error


def run() -> None:
    """Entry point of `python -m seqjax.main`."""
    if not any(a.startswith(("--help", "-h")) for a in sys.argv[1:]):
        run_command(check_config_flag)
    # the outer one hears what a config file says while the flags are parsed
    run_command(
        lambda argv: app.run(lambda rest: run_command(main, rest), argv=[sys.argv[0], *argv], flags_parser=parse_flags)
    )


if __name__ == "__main__":
    run()
