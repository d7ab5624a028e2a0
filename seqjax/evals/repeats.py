"""`seqjax repeats`: test whether a model reuses an earlier passage, by distance.

    seqjax repeats --workdir=runs/x --lengths=2048,16384

This test is easier than `seqjax niah`, so small models can pass it. A sample is held-out text from one domain, and its
last tokens are replaced with a passage from another document. For each distance, a copy of the sample also contains the
passage that many tokens earlier. The first tokens of the passage, the cue, identify it. The reported loss is the mean
over the remaining tokens; a sample without the earlier passage is the baseline. A model that copies from the whole
sequence has a small loss at every distance. A model that forgets approaches the baseline.

Each length's result is saved to repeats.json in the workdir, and the same command resumes with the missing lengths.
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

PASSAGE, CUE = 64, 8  # tokens per passage, and its first tokens that are not scored


def distances(length: int) -> list[int]:
    """Return the distances between passage starts.

    They are 64, 128, ..., and the largest distance that fits.
    """
    most = length + 1 - PASSAGE
    return [*(d for d in (PASSAGE * 2**i for i in range(most.bit_length())) if d < most), most]


def sample(text: np.ndarray, passage: np.ndarray, distance: int | None) -> np.ndarray:
    """Return a copy of `text` that ends with `passage`.

    Unless `distance` is None, the passage also occurs `distance` tokens earlier.
    """
    sequence = text.copy()
    starts = [len(text) - PASSAGE, *([] if distance is None else [len(text) - PASSAGE - distance])]
    for start in starts:
        sequence[start : start + PASSAGE] = passage
    return sequence


def drawn(corpus: Corpus, domain: str, *, length: int, n: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `n` pairs of a text and a passage from another block.

    A text has `length` + 1 tokens. If the domain has fewer than `n` held-out texts of this length, texts are reused
    with newly drawn passages. Raises `UserError` if it has none.
    """
    block = corpus.seq_len + 1
    n_blocks = 1 - -(length + 1) // block  # blocks per text, plus one for its passage
    tokens = corpus.eval_blocks(domain, count=n * n_blocks).tokens
    texts = tokens[: len(tokens) // n_blocks * n_blocks].reshape(-1, n_blocks, block)
    if not len(texts):
        raise UserError(
            f"--lengths={length}: {domain} has {len(tokens)} held-out blocks of {block} tokens, and a sample needs "
            f"{n_blocks}. Give a shorter length or another --domain."
        )
    rng = np.random.default_rng(seed)
    pairs = []
    for rows in (texts[i % len(texts)] for i in range(n)):
        start = rng.integers(block - PASSAGE + 1)
        pairs.append((rows[1:].reshape(-1)[: length + 1], rows[0, start : start + PASSAGE]))
    return pairs


def losses(m: Pretrained, sequences: Sequence[np.ndarray], *, batch_size: int) -> np.ndarray:
    """Return each sequence's mean loss on its last passage after the cue.

    Losses are float64, in nats per token.
    """

    @jax.jit
    def run(params: Any, tokens_BT1: jax.Array) -> jax.Array:
        return m.model.token_losses(params, tokens_BT1)[:, CUE - PASSAGE :].mean(-1)

    means = []
    for start in range(0, len(sequences), batch_size):
        batch = np.stack(sequences[start : start + batch_size]).astype(np.int32)
        # Pad the last batch to reuse the compiled program.
        filled = np.concatenate([batch, np.repeat(batch[-1:], batch_size - len(batch), axis=0)])
        means.append(np.asarray(run(m.params, jnp.asarray(filled)), np.float64)[: len(batch)])
    return np.concatenate(means)


def measure(m: Pretrained, corpus: Corpus, domain: str, *, length: int, n: int, seed: int, batch_size: int) -> Any:
    """Return the mean losses over samples.

    The result has the loss without the earlier passage ("alone"), and the losses by distance.
    """
    with_repeat = distances(length)
    pairs = drawn(corpus, domain, length=length, n=n, seed=seed)
    sequences = [sample(text, passage, distance) for text, passage in pairs for distance in (None, *with_repeat)]
    means = losses(m, sequences, batch_size=batch_size).reshape(n, 1 + len(with_repeat)).mean(0)
    baseline, *repeat_losses = (float(x) for x in means)
    by_distance = {str(d): x for d, x in zip(with_repeat, repeat_losses, strict=True)}
    return {"alone": baseline, "losses": by_distance, "samples": n}


# Form of repeats.json, in addition to the identity keys.
FORM = {"lengths?": {int: {"alone": float, "losses": {int: float}, "samples": int}}}


def main(argv: list[str]) -> None:
    """Measure, print and save the losses at each length."""
    parser = command_parser("repeats", description=__doc__)
    parser.add_argument("--workdir", required=True, type=store.location, help="a run")
    parser.add_argument("--lengths", default="", help="sample lengths in tokens: 2048,16384 (the training length)")
    parser.add_argument("--domain", default="", help="text domain (the run's first evaluation domain)")
    parser.add_argument("--samples", type=int, default=32, help="texts per length (32)")
    parser.add_argument("--seed", type=int, default=0, help="passage seed (0)")
    parser.add_argument("--batch_size", type=int, default=4, help="sequences per batch (4)")
    parser.add_argument("--again", action="store_true", help="also measure lengths that already have a result")
    add_allow_code(parser)
    args = parser.parse_args(argv)
    for name in ("samples", "batch_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}: give at least 1.")
    m = seqjax.load(args.workdir, allow_code=args.allow_code)
    config = m.config
    lengths = niah.lengths_of(args.lengths or str(config.train.seq_len))
    if min(lengths) < 2 * PASSAGE:
        raise UserError(f"--lengths: a sample has a {PASSAGE}-token passage twice; give at least {2 * PASSAGE}.")
    if m.model.longest and m.model.longest < max(lengths):
        raise UserError(f"--lengths: the model's position table has {m.model.longest} entries; give shorter lengths.")
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    domain = args.domain or corpus.eval_domains[0]
    if domain not in corpus.eval_domains:
        raise UserError(f"--domain={domain}: choose from this run's {', '.join(corpus.eval_domains)}.")
    path = Path(args.workdir) / "repeats.json"
    settings = {"seed": args.seed, "samples": args.samples, "domain": domain, "manifest": corpus.manifest_hash}
    identity = {"step": m.step, "parameters_sha256": fingerprint(m.params)} | settings
    results = {} if args.again else niah.saved_results(path, identity, FORM)
    for length in lengths:
        if str(length) not in results:
            results[str(length)] = measure(
                m, corpus, domain, length=length, n=args.samples, seed=args.seed, batch_size=args.batch_size
            )
            niah.save(path, identity | {"lengths": results})
        sys.stdout.write(f"{table(length, results[str(length)])}\n")
        sys.stdout.flush()


def table(length: int, result: dict[str, Any]) -> str:
    """Format a result as lines: the baseline loss, then losses by distance."""
    lines = [f"{length:,} tokens, {result['samples']} samples: passage loss (nats per token) by distance"]
    lines += [f"    baseline  {result['alone']:8.3f}"]
    lines += [f"{int(d):12,}  {x:8.3f}" for d, x in result["losses"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
