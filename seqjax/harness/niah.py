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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import seqjax
from seqjax.arguments import command_parser
from seqjax.decoding import Sampling, encode
from seqjax.errors import UserError, run_command
from seqjax.files import read_json, write_json
from seqjax.harness import passkey
from seqjax.harness.generation import Prompt, generate
from seqjax.harness.scoring import bucket_of
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
    """Return the share of samples whose number the model writes; `batch_size` prompts at most go together."""
    prompts = [
        Prompt(
            ids=[m.tokenizer.bos, *encode(m.tokenizer, sample.prompt, vocab_size=m.model.config.vocab_size).tolist()],
            until=(),
            n_new=passkey.NEW_TOKENS,
            sampling=Sampling(temperature=0.0),
        )
        for sample in samples
    ]

    def found(i: int, text: str) -> bool:
        return passkey.is_right(text, samples[i].value)

    longest = max(len(prompt.ids) for prompt in prompts) + passkey.NEW_TOKENS
    batch_tokens = batch_size * bucket_of(longest, longest=m.model.longest)
    texts = generate(m, prompts, batch_tokens=batch_tokens, seed=0, prefill_chunk=prefill_chunk, enough=found)
    return sum(found(i, text) for i, text in enumerate(texts)) / len(samples)


def main(argv: list[str]) -> None:
    """Print and write the accuracy at every length."""
    parser = command_parser("niah", description=__doc__)
    parser.add_argument("--workdir", required=True, help="a run, or a directory of a public model")
    parser.add_argument("--lengths", required=True, help="tokens of the prompts with their answers: 4096,8192")
    parser.add_argument("--samples", type=int, default=500, help="samples of each length (500, as in RULER)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0, as in the harness)")
    parser.add_argument("--batch_size", type=int, default=4, help="prompts at a time, at most (4)")
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
