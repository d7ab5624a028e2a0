"""Convert text to token blocks per domain, with a manifest.

    seqjax prepare --source=DIR_OR_GLOB --out=DIR --tokenizer=mixtral|byte|huggingface|FILE [--seq_len=2048]

Text files are *.jsonl, *.jsonl.gz, *.jsonl.zst or *.parquet with one document per row, or *.txt with one document per
file. The domain is SlimPajama's set name in meta.redpajama_set_name, or a folder named after such a domain. For other
text, give the domain's location:

    --domain_field=meta.source    a field in the row
    --domain_from=folder          the first folder below the source that is not train, validation or test
    --domain=news                 one domain for all text

To resume a stopped preparation, run the same command again. docs/data.md describes input and output.
"""

import sys

from seqjax.command_line import Parser, command_parser, run_command, words
from seqjax.data import slimpajama
from seqjax.data.layout import Layout
from seqjax.data.prepare.executors import LOCAL
from seqjax.data.prepare.results import next_step, summary
from seqjax.data.prepare.run import VALIDATION, prepare
from seqjax.data.tokenizer import NAMES
from seqjax.errors import UserError, nearest
from seqjax.terminal import tell


def parser() -> Parser:
    """Return the parser of the command."""
    out = command_parser("prepare", description=__doc__)
    out.add_argument("--source", required=True, help="directory or glob of the files")
    out.add_argument("--out", required=True, help="directory for the blocks and the manifest")
    out.add_argument(
        "--tokenizer",
        required=True,
        help="mixtral, byte or huggingface; or a file: a sentencepiece *.model, or a tokenizer.json",
    )
    out.add_argument(
        "--tokenizer_path",
        default="",
        help="mixtral: a sentencepiece file; huggingface: a public model's directory",
    )
    out.add_argument("--seq_len", default=2048, type=int, help="T: blocks hold T + 1 tokens (2048)")
    out.add_argument("--workers", default=0, type=int, help="processes; 0 = one per core (0)")
    out.add_argument(
        "--executor",
        default=LOCAL,
        help="local (processes on this machine), or dask:ADDRESS (the workers of a running Dask cluster), "
        "for example dask:10.0.0.1:8786 (local)",
    )
    known = ", ".join(slimpajama.NAMES)
    out.add_argument("--text_field", default="text", help="text field; a.b is field b within a (text)")
    out.add_argument("--domain_field", default="", help="domain field")
    out.add_argument("--domain_from", default="", choices=("", "folder"), help="folder: folders are domains")
    out.add_argument("--domain", default="", help="one domain for all documents")
    out.add_argument("--domains", default=[], type=words, help=f"keep only these domains; SlimPajama has {known} (all)")
    out.add_argument(
        "--validation",
        type=float,
        help="share of documents to hold out by a hash of their text, if there is no validation split "
        f"({VALIDATION}; 0 for SlimPajama's layout)",
    )
    out.add_argument("--min_tokens", default=0, type=int, help="leave out documents with fewer tokens (0)")
    out.add_argument("--max_tokens", default=0, type=int, help="cut documents to this many tokens; 0 = no limit (0)")
    out.add_argument("--strict", action="store_true", help="stop at the first bad line instead of skipping it")
    out.add_argument(
        "--verify",
        action="store_true",
        help="compare all finished text and blocks with their hashes; otherwise only text that changed later is "
        "compared",
    )
    return out


def tokenizer_file(tokenizer: str, path: str) -> tuple[str, str]:
    """Return the tokenizer's name and path from the options.

    --tokenizer may also be the file. Raises `UserError` for an unknown tokenizer.
    """
    for suffix, name in ((".json", "huggingface"), (".model", "mixtral")):
        if tokenizer.endswith(suffix):
            if path:
                raise UserError(f"--tokenizer={tokenizer} is a file already; leave out --tokenizer_path.")
            return name, tokenizer
    if tokenizer not in NAMES:
        raise UserError(f"--tokenizer={tokenizer} is not known.{nearest(tokenizer, NAMES)} Or give its file.")
    return tokenizer, path


def main(argv: list[str]) -> None:
    """Prepare the blocks and print the manifest as a table."""
    args = parser().parse_args(argv)
    layout = Layout(args.text_field, args.domain_field, args.domain_from, args.domain)
    tokenizer, tokenizer_path = tokenizer_file(args.tokenizer, args.tokenizer_path)
    try:
        manifest = prepare(
            args.source,
            args.out,
            tokenizer=tokenizer,
            tokenizer_path=tokenizer_path,
            seq_len=args.seq_len,
            workers=args.workers,
            executor=args.executor,
            domains=args.domains,
            layout=layout,
            validation=args.validation,
            min_tokens=args.min_tokens,
            max_tokens=args.max_tokens,
            strict=args.strict,
            verify=args.verify,
        )
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped. Finished shards are kept; run the same command again to resume.\n")
        sys.exit(130)
    tell(summary(manifest))
    tell(next_step(manifest, args.out, tokenizer_path=tokenizer_path))


if __name__ == "__main__":
    run_command(main)
