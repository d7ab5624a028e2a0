"""`seqjax niah`: does a model find one number in a long text?

    seqjax niah --workdir=runs/x --lengths=4096,8192,16384,32768,102400

The passkey task of RULER (S-NIAH-1), with the samples that lm-evaluation-harness draws with this tokenizer and seed
(seqjax/harness/passkey.py): repeated lines, a number in one of them, and the question for it at the end. The prompt
goes through the cache as in `seqjax generate`, the answer is the most likely tokens, and a sample counts if the number
is in their text. Below it stand the accuracies of the paper (arXiv 2505.18522, table 3). Each length's result goes to
niah.json in the workdir as it ends, and the same command goes on with the lengths that are missing.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import seqjax
from seqjax.arguments import command_parser
from seqjax.decoding import Sampling, TextDecoder, encode, tokens
from seqjax.errors import UserError, run_command
from seqjax.files import read_json, write_json
from seqjax.harness import passkey
from seqjax.nn.params import fingerprint
from seqjax.pretrained import Pretrained

# Models of 135M trained at 100k tokens, percent of 500 samples each; five lengths, of which only the last, 100k, can be
# read in our copy, and where there are four numbers, which of the lengths they belong to cannot.
PAPER = {
    "RWKV-7": (70.80, 14.80, 1.20, 0.00, 0.20),
    "RWKV-7 shell, full attention": (49.80, 25.60, 16.20, 15.80),
    "RWKV-7 shell, W=256": (1.60, 0.40, 0.20, 0.20, 0.40),
    "RWKV-7 shell, Top-1 exact": (49.80, 22.00, 15.00, 11.80),
    "RWKV-7 shell, Top-1 approx": (48.60, 21.40, 21.80, 15.00),
}


def accuracy(m: Pretrained, samples: Sequence[passkey.Sample], *, batch_size: int, prefill_chunk: int) -> float:
    """Return the share of samples whose number the model writes.

    Prompts of the same number of tokens go together, `batch_size` at a time; fewer are filled up, so that one program
    serves all.
    """
    right = 0
    for group in _groups(m, samples, batch_size):
        prompts_BT = np.stack([ids for ids, _ in group])
        filled_BT = np.resize(prompts_BT, (batch_size, prompts_BT.shape[1]))
        new = tokens(
            m.params,
            filled_BT,
            jax.random.key(0),
            model=m.model,
            n_new=passkey.NEW_TOKENS,
            sampling=Sampling(temperature=0.0),
            prefill_chunk=prefill_chunk,
            mesh=m.mesh,
        )
        right += sum(_found(m, new, [(ids.tolist(), sample.value) for ids, sample in group]))
    return right / len(samples)


def _groups(
    m: Pretrained, samples: Sequence[passkey.Sample], batch_size: int
) -> Iterator[list[tuple[np.ndarray, passkey.Sample]]]:
    """Yield the prompts as ids with BOS, at most `batch_size` of one length together."""
    by_length: dict[int, list[tuple[np.ndarray, passkey.Sample]]] = {}
    for sample in samples:
        ids = encode(m.tokenizer, sample.prompt, vocab_size=m.model.config.vocab_size)
        by_length.setdefault(len(ids), []).append((np.array([m.tokenizer.bos, *ids], np.int32), sample))
    for _, of_length in sorted(by_length.items()):
        for i in range(0, len(of_length), batch_size):
            yield of_length[i : i + batch_size]


def _found(m: Pretrained, new: Iterator[np.ndarray], group: list[tuple[list[int], str]]) -> list[bool]:
    """Return which of a batch write their number before they end; decoding stops when nothing can change any more."""
    decoders = [TextDecoder(m.tokenizer, ids) for ids, _ in group]
    texts, ended, found = [""] * len(group), [False] * len(group), [False] * len(group)
    for token_B in new:
        for i, (decoder, (_, value)) in enumerate(zip(decoders, group, strict=True)):
            if not ended[i]:
                is_end = int(token_B[i]) == m.tokenizer.eos
                texts[i] += decoder.flush() if is_end else decoder.push(int(token_B[i]))
                found[i] = passkey.is_right(texts[i], value)
                ended[i] = is_end or found[i]
        if all(ended):
            break
    return [
        was or passkey.is_right(text + ("" if end else decoder.flush()), value)
        for was, text, end, decoder, (_, value) in zip(found, texts, ended, decoders, group, strict=True)
    ]


def main(argv: list[str]) -> None:
    """Print and write the accuracy at every length."""
    parser = command_parser("niah", description=__doc__)
    parser.add_argument("--workdir", required=True, help="a run, or a directory of a public model")
    parser.add_argument("--lengths", required=True, help="tokens of the prompts with their answers: 4096,8192")
    parser.add_argument("--samples", type=int, default=500, help="samples of each length (500, as in RULER)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0, as in the harness)")
    parser.add_argument("--batch_size", type=int, default=4, help="prompts at a time (4)")
    parser.add_argument("--again", action="store_true", help="measure lengths that have a result already, too")
    parser.add_argument(
        "--prefill_chunk", type=int, default=1024, help="tokens of a prompt fed at a time; 0 = all (1024)"
    )
    args = parser.parse_args(argv)
    lengths = _lengths(args.lengths)
    for name in ("samples", "batch_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}: give at least 1.")
    m = seqjax.load(args.workdir)
    if m.model.longest and m.model.longest < max(lengths) + 1:
        raise UserError(f"--lengths: this model has a table of {m.model.longest} positions; give shorter ones.")
    path = Path(args.workdir) / "niah.json"
    # Samples follow from the seed and from the lengths before, so only the same lengths have the same samples.
    asked = {"seed": args.seed, "samples": args.samples, "asked": lengths}
    identity = {"step": m.step, "parameters_sha256": fingerprint(m.params)} | asked
    results = {} if args.again else _found_before(path, identity)
    rng = random.Random(args.seed)
    for length in lengths:
        try:
            drawn = list(
                passkey.samples(lambda text: len(m.tokenizer.encode(text)), length=length, n=args.samples, rng=rng)
            )
        except ValueError as error:
            raise UserError(f"--lengths: {error}.") from None
        if str(length) not in results:
            share = accuracy(m, drawn, batch_size=args.batch_size, prefill_chunk=args.prefill_chunk)
            results[str(length)] = {"accuracy": share, "samples": len(drawn)}
            _save(path, identity | {"lengths": results})
        share = results[str(length)]["accuracy"]
        sys.stdout.write(f"{length:9,}  {100 * share:6.2f}%  of {len(drawn)}\n")
        sys.stdout.flush()
    sys.stdout.write("The paper's models, at five lengths of which the last is 100k:\n")
    for name, values in PAPER.items():
        sys.stdout.write(f"  {name:30}{''.join(f'{value:8.2f}' for value in values)}\n")


def _lengths(text: str) -> list[int]:
    words = [word for word in text.split(",") if word]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--lengths={text}: give numbers of tokens with commas, as in --lengths=4096,8192.")
    return [int(word) for word in words]


def _found_before(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the results by length in a file of this checkpoint and these samples, or none."""
    written = read_json(path) if path.is_file() else {}
    same = all(written.get(key) == value for key, value in identity.items())
    return written["lengths"] if same else {}


def _save(path: Path, result: dict[str, Any]) -> None:
    try:
        write_json(path, result)
    except OSError as error:  # of a workdir that is only to be read
        sys.stderr.write(f"{path} was not written ({error.strerror}).\n")


if __name__ == "__main__":
    run_command(main)
