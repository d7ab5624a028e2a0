"""Converts public models to a workdir and back.

    seqjax convert import --weights=PATH --workdir=DIR [--config=NAME_OR_FILE[:SIZE][,key=value]]
    seqjax convert export --workdir=DIR --out=DIR2 [--dtype=bfloat16] [--weights_only]

`import` takes a Hugging Face directory (config.json, .safetensors, tokenizer), or hf://OWNER/NAME for a model on the
Hugging Face hub, and writes a workdir for the other commands. Weights without config.json (a .safetensors file or an
index) need --config. `export` writes a run's newest checkpoint as a directory that `from_pretrained` of transformers
(or fla) opens.
"""

import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from absl import logging

from seqjax import store
from seqjax.command_line import command_parser, run_command
from seqjax.config import Config, from_config_dict, presets
from seqjax.convert import directory, tokenizer_files
from seqjax.convert.directory import fetched
from seqjax.convert.files import PICKLED
from seqjax.convert.weights import family_of
from seqjax.errors import UserError
from seqjax.nn.params import count
from seqjax.terminal import tell
from seqjax.training import mirrors
from seqjax.training import workdir as workdirs
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.evaluate import restore
from seqjax.training.mirrors import Mirror


def to_workdir(weights: str | Path, config: Config | None, workdir: str | Path) -> None:
    """Write a workdir with the public model as its only checkpoint (step 0), and the tokenizer.

    `weights` is a directory, a file or `hf://OWNER/NAME`; without a `config` the directory's config.json defines the
    model. Raises `UserError` if the workdir is in use.
    """
    mirror = Mirror(workdir)
    here = mirror.directory
    used = store.sizes(mirror.url) if mirror.url else (here / "config.json").exists() or (here / "checkpoints").exists()
    if used:
        raise UserError(f"{mirror} holds a run; import into a new --workdir.")
    mirrors.require_inside(here)
    mirror.pull()  # removes local files of a run that was deleted in the store
    files = fetched(weights)
    source = directory.holding(files)
    argument = "" if config else directory.described(source).argument
    config, params = directory.load(files, config=config)
    tokenizer = tokenizer_files.find(source)
    if tokenizer and tokenizer[1]:
        tokenizer_files.copy(source, here / mirrors.TOKENIZER)
    workdirs.save_config(mirror, config)
    mirror.push()
    checkpoints = Checkpoints(str(mirror))
    checkpoints.save_params(0, params)
    checkpoints.wait()
    checkpoints.close()
    tokenizer_text = f"tokenizer {tokenizer[0]}" if tokenizer else "no tokenizer"
    tell(f"{mirror}: {family_of(config).name}, {count(params):,} parameters, step 0; {tokenizer_text}.")
    for line in _next_commands(mirror.url or str(here.absolute()), argument) if tokenizer else ():
        tell(f"  {line}")
    if argument and not tokenizer:
        tell(f"The model as a --config, to which the tokenizer and settings can be added: {argument}")


def _next_commands(workdir: str, argument: str) -> Iterator[str]:
    """Yield commands to run next; `argument` is the model as a --config, or "" if --config was set."""
    yield "Try next, with the settings of a run added:" if argument else "Try next:"
    yield shlex.join(["seqjax", "generate", f"--workdir={workdir}", "--prompt=Once upon a time"])
    if argument:
        data = workdirs.load_config(workdir).data  # includes the tokenizer's path in the workdir
        words = ["seqjax", "train", f"--init_from={workdir}", f"--config={argument}"]
        words.append(f"--config.data.tokenizer={data.tokenizer}")
        words += [f"--config.data.tokenizer_path={data.tokenizer_path}"] * bool(data.tokenizer_path)
        yield shlex.join(words)


def to_directory(
    workdir: str | Path,
    out: str | Path,
    dtype: str,
    *,
    with_tokenizer: bool = True,
    allow_code: Collection[str] = (),
) -> None:
    """Write a run's newest checkpoint as a public directory; `out` may also name the model.safetensors in it."""
    out = store.local(out, "--out")
    if out.suffix in (".safetensors", *PICKLED) and out.name != directory.WEIGHTS:
        raise UserError(f"--out={out}: an export names its weights {directory.WEIGHTS}; give the directory.")
    target = out.parent if out.name == directory.WEIGHTS else out
    if target.exists() and not target.is_dir():
        raise UserError(f"--out={out} is a file; give a directory.")
    family = family_of(workdirs.load_config(workdir, allow_code=allow_code))
    config, _, params, step, _ = restore(workdir, allow_code=allow_code)
    directory.export(params, config, target, dtype=dtype, with_tokenizer=with_tokenizer)
    tokenizer = f"tokenizer {config.data.tokenizer}" if with_tokenizer else "no tokenizer"
    tell(f"{target}: {family.name}, step {step} of {workdir}, {dtype}, {tokenizer}.")


def main(argv: list[str]) -> None:
    """Run `import` or `export`."""
    logging.set_verbosity(logging.ERROR)  # Orbax warns that it is read-only, which is intended here.
    parser = command_parser("convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export")
    import_parser = commands.add_parser("import", help="public model -> workdir")
    import_parser.add_argument(
        "--weights", required=True, help="a directory, hf://OWNER/NAME[@REVISION], .safetensors or its index"
    )
    import_parser.add_argument(
        "--config", help="NAME_OR_FILE[:SIZE][,key=value], for weights without config.json or to train on"
    )
    import_parser.add_argument(
        "--workdir", required=True, type=store.location, help="the directory to write, also gs://"
    )
    export_parser = commands.add_parser("export", help="workdir -> public model")
    workdirs.add_arguments(export_parser)
    export_parser.add_argument("--out", required=True, type=store.location, help="the directory to write")
    export_parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    export_parser.add_argument(
        "--weights_only", action="store_true", help="write no tokenizer; its ids in config.json are then null"
    )
    args = parser.parse_args(argv)
    if args.command == "import":
        config = from_config_dict(presets.read_config(args.config)) if args.config else None
        to_workdir(args.weights, config, args.workdir)
    else:
        tokenizer = not args.weights_only
        to_directory(args.workdir, args.out, args.dtype, with_tokenizer=tokenizer, allow_code=args.allow_code)


if __name__ == "__main__":
    run_command(main)
