"""Converts public weights to a workdir and back.

    seqjax convert import --weights=PATH --config=NAME_OR_FILE[:SIZE][,key=value] --workdir=DIR
    seqjax convert export --workdir=DIR --out=FILE.safetensors [--dtype=bfloat16]

`import` takes a .safetensors file, an index of several or the directory that holds them, and writes a workdir for
the other commands. `export` writes the newest checkpoint of a run, and a config.json beside it.
"""

import sys
from collections.abc import Collection
from pathlib import Path

from absl import logging

from seqjax import presets
from seqjax.arguments import command_parser
from seqjax.config import Config, from_config_dict
from seqjax.convert.weights import export_weights, family_of, import_weights
from seqjax.errors import UserError, run_command
from seqjax.evaluate import restore
from seqjax.nn.params import count
from seqjax.training import workdir as workdirs
from seqjax.training.checkpoint import Checkpoints


def to_workdir(weights: str | Path, config: Config, workdir: str | Path) -> None:
    """Write a workdir whose only checkpoint, of step 0, holds the public weights; raise `UserError` if it is in use."""
    workdir = Path(workdir)
    if (workdir / "config.json").exists() or (workdir / "checkpoints").exists():
        raise UserError(f"{workdir} holds a run; import into a --workdir of its own.")
    params = import_weights(weights, config)
    workdirs.save_config(workdir, config)
    checkpoints = Checkpoints(workdir)
    checkpoints.save_params(0, params)
    checkpoints.wait()
    checkpoints.close()
    sys.stdout.write(f"{workdir}: {family_of(config).name}, {count(params):,} parameters, step 0.\n")


def to_file(workdir: str | Path, out: str | Path, dtype: str, *, allow_code: Collection[str] = ()) -> None:
    """Write the newest checkpoint of a run as a .safetensors file with public names."""
    out = Path(out)
    if out.suffix != ".safetensors":
        raise UserError(f"--out={out} must end in .safetensors.")
    family = family_of(workdirs.load_config(workdir, allow_code=allow_code))
    config, _, params, step, _ = restore(workdir, allow_code=allow_code)
    export_weights(params, config, out, dtype=dtype)
    sys.stdout.write(f"{out}: {family.name}, step {step} of {workdir}, {dtype}; {out.parent / 'config.json'}.\n")


def main(argv: list[str]) -> None:
    """Run `import` or `export`."""
    logging.set_verbosity(logging.ERROR)  # Orbax warns that it is read-only, which is intended here.
    parser = command_parser("convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    import_parser = commands.add_parser("import", help="public weights -> workdir")
    import_parser.add_argument(
        "--weights", required=True, type=Path, help=".safetensors, its index, or their directory"
    )
    import_parser.add_argument("--config", required=True, help="NAME_OR_FILE[:SIZE][,key=value]")
    import_parser.add_argument("--workdir", required=True, type=Path, help="the directory to write")
    export_parser = commands.add_parser("export", help="workdir -> public weights")
    workdirs.add_arguments(export_parser)
    export_parser.add_argument("--out", required=True, type=Path, help="the .safetensors file to write")
    export_parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args(argv)
    if args.command == "import":
        to_workdir(args.weights, from_config_dict(presets.read_config(args.config)), args.workdir)
    else:
        to_file(args.workdir, args.out, args.dtype, allow_code=args.allow_code)


if __name__ == "__main__":
    run_command(main)
