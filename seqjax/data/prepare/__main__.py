"""Converts SlimPajama-shaped `*.jsonl.zst` shards to blocks of tokens per domain, with a manifest.

    seqjax prepare --source=DIR_OR_GLOB --out=DIR --tokenizer=mixtral|byte|huggingface [--seq_len=2048]

A preparation that was stopped goes on when the same command is run again. docs/data.md describes input and output.
"""

import sys

from seqjax.arguments import Parser, command_parser, words
from seqjax.data import slimpajama
from seqjax.data.prepare.manifest import summary
from seqjax.data.prepare.run import prepare
from seqjax.errors import run_command


def parser() -> Parser:
    """Return the parser of the command."""
    out = command_parser("prepare", description=__doc__)
    out.add_argument("--source", required=True, help="directory or glob of *.jsonl.zst shards")
    out.add_argument("--out", required=True, help="directory for the blocks and the manifest")
    out.add_argument("--tokenizer", required=True, choices=("mixtral", "byte", "huggingface"), help="the vocabulary")
    out.add_argument(
        "--tokenizer_path",
        default="",
        help="mixtral: a sentencepiece file; huggingface: a public model's directory",
    )
    out.add_argument("--seq_len", default=2048, type=int, help="T: blocks hold T + 1 tokens (2048)")
    out.add_argument("--workers", default=0, type=int, help="processes; 0 = one per core (0)")
    known = ",".join(slimpajama.NAMES)
    out.add_argument("--domains", default=[], type=words, help=f"keep only these of {known} (all)")
    out.add_argument("--min_tokens", default=0, type=int, help="leave out documents with fewer tokens (0)")
    out.add_argument("--max_tokens", default=0, type=int, help="cut documents to so many tokens; 0 = whole (0)")
    out.add_argument("--strict", action="store_true", help="stop at the first bad line instead of skipping it")
    return out


def main(argv: list[str]) -> None:
    """Prepare the blocks and print a table of the manifest."""
    given = parser().parse_args(argv)
    try:
        manifest = prepare(
            given.source,
            given.out,
            tokenizer=given.tokenizer,
            tokenizer_path=given.tokenizer_path,
            seq_len=given.seq_len,
            workers=given.workers,
            domains=given.domains,
            min_tokens=given.min_tokens,
            max_tokens=given.max_tokens,
            strict=given.strict,
        )
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped. Finished shards are kept; run the same command again to go on.\n")
        sys.exit(130)
    sys.stdout.write(summary(manifest) + "\n")


if __name__ == "__main__":
    run_command(main)
