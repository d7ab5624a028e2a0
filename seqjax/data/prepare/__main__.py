"""`python -m seqjax.data.prepare --source=DIR_OR_GLOB --out=DIR --tokenizer=mixtral|byte [--seq_len=2048]`."""

import sys
from typing import Any

from absl import app, flags

from seqjax.data.prepare.manifest import summary
from seqjax.data.prepare.run import prepare
from seqjax.errors import UserError


def _define_flags() -> None:
    flags.DEFINE_string("source", None, "Directory or glob of *.jsonl.zst shards.", required=True)
    flags.DEFINE_string("out", None, "Directory for the blocks and the manifest.", required=True)
    flags.DEFINE_enum("tokenizer", None, ["mixtral", "byte"], "Vocabulary.", required=True)
    flags.DEFINE_string("tokenizer_path", "", "A sentencepiece file instead of mistral-common's.")
    flags.DEFINE_integer("seq_len", 2048, "T: blocks hold T + 1 tokens.")
    flags.DEFINE_integer("workers", 0, "Processes; 0 = one per core.")
    flags.DEFINE_list("domains", [], "Keep only these domains; empty = all seven.")
    flags.DEFINE_integer("min_tokens", 0, "Leave out documents with fewer tokens.")
    flags.DEFINE_integer("max_tokens", 0, "Cut documents to so many tokens; 0 = keep them whole.")
    flags.DEFINE_bool("strict", False, "Stop at the first bad line instead of skipping it.")


def main(argv: list[str]) -> None:
    """Run the command; exit with status 2 and a message after a `UserError`, and with 130 when interrupted."""
    try:
        if len(argv) > 1:
            raise UserError(f"Unknown argument {argv[1]!r}; flags are written --name=value.")
        given: Any = flags.FLAGS
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
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped. Finished shards are kept; run the same command again to go on.\n")
        sys.exit(130)
    sys.stdout.write(summary(manifest) + "\n")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
