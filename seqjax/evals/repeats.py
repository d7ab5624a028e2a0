"""`seqjax repeats`: does a model use a passage that it has read before, and from how far?

    seqjax repeats --workdir=runs/x --lengths=2048,16384

An easier needle than a number in a long text, which small models of text can find as well. Every sample is held-out
text of one domain whose last tokens are a passage of another document. The same passage stands once before, so many
tokens earlier, in a copy of the sample for every distance. Its first tokens, the cue, tell which passage comes; the
loss on the others is what counts, beside that of the sample without the first passage. A model that sees the whole
sequence and copies has a small loss at every distance; one that forgets approaches the loss without it.

Each length's result is written to repeats.json in the workdir as it ends, and the same command goes on with those that
are missing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import seqjax
from seqjax import store
from seqjax.command_line import command_parser, run_command
from seqjax.data import Corpus, open_corpus
from seqjax.errors import UserError
from seqjax.evals import niah
from seqjax.nn.params import fingerprint
from seqjax.pretrained import Pretrained
from seqjax.training.workdir import add_allow_code

PASSAGE, CUE = 64, 8  # tokens of a passage, and of those that tell which one it is


def distances(length: int) -> list[int]:
    """Return how many tokens lie between the beginnings of the two passages: powers of two, and the most that fit."""
    most = length + 1 - PASSAGE
    return [*(d for d in (PASSAGE * 2**i for i in range(most.bit_length())) if d < most), most]


def sample(text: np.ndarray, passage: np.ndarray, distance: int | None) -> np.ndarray:
    """Return a copy of `text` that ends with `passage` and has it `distance` tokens before, or not for None."""
    made = text.copy()
    starts = [len(text) - PASSAGE, *([] if distance is None else [len(text) - PASSAGE - distance])]
    for start in starts:
        made[start : start + PASSAGE] = passage
    return made


def drawn(corpus: Corpus, domain: str, *, length: int, n: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `n` texts of `length` + 1 tokens, each with a passage of another block of the domain.

    If the domain has fewer held-out texts of that length, they come again with other passages of their other block.
    Raises `UserError` if it has none.
    """
    block = corpus.seq_len + 1
    each = 1 - -(length + 1) // block  # blocks of a text, and one for its passage
    tokens = corpus.eval_blocks(domain, count=n * each).tokens
    texts = tokens[: len(tokens) // each * each].reshape(-1, each, block)
    if not len(texts):
        raise UserError(
            f"--lengths={length}: {domain} has {len(tokens)} held-out blocks of {block} tokens, and a sample takes "
            f"{each}; choose a shorter length, or another domain."
        )
    rng = np.random.default_rng(seed)
    found = []
    for rows in (texts[i % len(texts)] for i in range(n)):
        start = rng.integers(block - PASSAGE + 1)
        found.append((rows[1:].reshape(-1)[: length + 1], rows[0, start : start + PASSAGE]))
    return found


def losses(m: Pretrained, sequences: Sequence[np.ndarray], *, batch_size: int) -> np.ndarray:
    """Return the mean loss of every sequence's last passage behind its cue, in nats per token, float64."""

    @jax.jit
    def run(params: Any, tokens_BT1: jax.Array) -> jax.Array:
        return m.model.token_losses(params, tokens_BT1)[:, CUE - PASSAGE :].mean(-1)

    found = []
    for start in range(0, len(sequences), batch_size):
        batch = np.stack(sequences[start : start + batch_size]).astype(np.int32)
        # The last batch is filled up, so that one program is enough.
        filled = np.concatenate([batch, np.repeat(batch[-1:], batch_size - len(batch), axis=0)])
        found.append(np.asarray(run(m.params, jnp.asarray(filled)), np.float64)[: len(batch)])
    return np.concatenate(found)


def measure(m: Pretrained, corpus: Corpus, domain: str, *, length: int, n: int, seed: int, batch_size: int) -> Any:
    """Return the mean losses over samples: without the first passage, and by distance."""
    asked = [None, *distances(length)]
    pairs = drawn(corpus, domain, length=length, n=n, seed=seed)
    sequences = [sample(text, passage, distance) for text, passage in pairs for distance in asked]
    means = losses(m, sequences, batch_size=batch_size).reshape(n, len(asked)).mean(0)
    alone, *found = (float(x) for x in means)
    return {"alone": alone, "losses": {str(d): x for d, x in zip(asked[1:], found, strict=True)}, "samples": n}


# Of repeats.json, besides the identity of what was measured.
FORM = {"lengths?": {int: {"alone": float, "losses": {int: float}, "samples": int}}}


def main(argv: list[str]) -> None:
    """Print and write the losses at every length."""
    parser = command_parser("repeats", description=__doc__)
    parser.add_argument("--workdir", required=True, type=store.location, help="a run")
    parser.add_argument("--lengths", default="", help="tokens of a sample: 2048,16384; those of training by default")
    parser.add_argument("--domain", default="", help="of the text; the first that the run is evaluated on by default")
    parser.add_argument("--samples", type=int, default=32, help="texts of each length (32)")
    parser.add_argument("--seed", type=int, default=0, help="of the passages (0)")
    parser.add_argument("--batch_size", type=int, default=4, help="sequences at a time (4)")
    parser.add_argument("--again", action="store_true", help="measure lengths that have a result already, too")
    add_allow_code(parser)
    args = parser.parse_args(argv)
    for name in ("samples", "batch_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}: give at least 1.")
    m = seqjax.load(args.workdir, allow_code=args.allow_code)
    config = m.config
    lengths = niah.lengths_of(args.lengths or str(config.train.seq_len))
    if min(lengths) < 2 * PASSAGE:
        raise UserError(f"--lengths: a sample holds a passage of {PASSAGE} tokens twice; give at least {2 * PASSAGE}.")
    if m.model.longest and m.model.longest < max(lengths):
        raise UserError(f"--lengths: this model has a table of {m.model.longest} positions; give shorter ones.")
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    domain = args.domain or corpus.eval_domains[0]
    if domain not in corpus.eval_domains:
        raise UserError(f"--domain={domain}: this run is evaluated on {', '.join(corpus.eval_domains)}.")
    path = Path(args.workdir) / "repeats.json"
    asked = {"seed": args.seed, "samples": args.samples, "domain": domain, "manifest": corpus.manifest_hash}
    identity = {"step": m.step, "parameters_sha256": fingerprint(m.params)} | asked
    results = {} if args.again else niah.found_before(path, identity, FORM)
    for length in lengths:
        if str(length) not in results:
            results[str(length)] = measure(
                m, corpus, domain, length=length, n=args.samples, seed=args.seed, batch_size=args.batch_size
            )
            niah.save(path, identity | {"lengths": results})
        sys.stdout.write(f"{table(length, results[str(length)])}\n")
        sys.stdout.flush()


def table(length: int, result: dict[str, Any]) -> str:
    """Return a result as lines: the loss without the first passage, then by distance."""
    lines = [f"{length:,} tokens, {result['samples']} samples: loss of a passage in nats per token"]
    lines += [f"  not before  {result['alone']:8.3f}"]
    lines += [f"{int(d):12,}  {x:8.3f}" for d, x in result["losses"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
