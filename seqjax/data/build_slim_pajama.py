"""Builds `slim_pajama`, a dataset of tensorflow-datasets, from local shards in SlimPajama's layout.

    python -m seqjax.data.build_slim_pajama --source=SHARDS --data_dir=DIR [--domains=arxiv,github]

Then DIR has slim_pajama/DOMAIN/1.0.0 in ArrayRecord files, which config.data.corpus=tfds reads, and every other reader
of tensorflow-datasets. The shards are read once per domain, by one process. A domain that DIR has already is left as
it is.
"""

import sys
from pathlib import Path

from seqjax.arguments import Parser, command_parser, words
from seqjax.data import slimpajama, tfds_datasets
from seqjax.errors import UserError, nearest, run_command


def build(source: str, data_dir: str | Path, domain: str) -> str:
    """Build one config from the shards below a directory, unless `data_dir` has it; return a line about it.

    Raises `UserError` if there are no shards, or none of them has a document of the domain.
    """
    tfds = tfds_datasets.require()
    from seqjax.data import slim_pajama_tfds

    root = Path(data_dir).expanduser().absolute()
    builder = slim_pajama_tfds.SlimPajama(config=domain, data_dir=str(root), file_format=tfds_datasets.FORMAT)
    there = Path(builder.data_dir).is_dir()
    if not there:
        builder.download_and_prepare(
            download_dir=str(root / ".downloads"),  # Nothing is, but the package makes the directory.
            download_config=tfds.download.DownloadConfig(manual_dir=str(Path(source).absolute())),
        )
    counts = ", ".join(f"{info.num_examples:,} {split}" for split, info in builder.info.splits.items())
    return f"{builder.data_dir}{' was there' if there else ''}: {counts} documents"


def parser() -> Parser:
    """Return the parser of the command."""
    out = command_parser("prepare", description=__doc__)
    out.prog = "python -m seqjax.data.build_slim_pajama"
    out.add_argument("--source", required=True, help="directory of the *.jsonl.zst shards")
    out.add_argument("--data_dir", required=True, help="directory of the datasets of tensorflow-datasets")
    known = ", ".join(slimpajama.NAMES)
    out.add_argument("--domains", default=list(slimpajama.NAMES), type=words, help=f"of {known} (all)")
    return out


def main(argv: list[str]) -> None:
    """Build the configs that are asked for."""
    given = parser().parse_args(argv)
    for domain in given.domains:
        if domain not in slimpajama.NAMES:
            raise UserError(f"--domains: {domain!r} is not one of SlimPajama's.{nearest(domain, slimpajama.NAMES)}")
    if not Path(given.source).is_dir():
        raise UserError(f"--source={given.source}: there is no such directory; give that of the shards.")
    for domain in given.domains:
        sys.stdout.write(build(given.source, given.data_dir, domain) + "\n")


if __name__ == "__main__":
    run_command(main)
