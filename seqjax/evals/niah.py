"""`seqjax niah`: does a model find one number in a long text?

    seqjax niah --workdir=runs/x --lengths=4096,8192,16384,32768,102400

The passkey task of RULER (S-NIAH-1; Hsieh et al., arXiv 2404.06654): repeated lines, a number in one of them, and the
question for it at the end. A seed gives the samples that lm-evaluation-harness 0.4.13 draws for `niah_single_1` with
the same tokenizer: the same lines, words and numbers, in the same order of random draws. The words are those of the
package wonderwords, as there.

The prompt goes through the cache as in `seqjax generate`, the answer is the most likely tokens, and a sample counts if
the number is in their text. The accuracies of the paper (arXiv 2505.18522, table 3) are printed below. Each length's
result is written to niah.json in the workdir as it ends, and the same command resumes with the missing lengths.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import seqjax
from seqjax import store
from seqjax.command_line import command_parser, run_command
from seqjax.decoding import Sampling, encode
from seqjax.errors import MissingPackageError, UserError
from seqjax.evals.generation import Prompt, generate
from seqjax.evals.scoring import bucket_of
from seqjax.files import write_json
from seqjax.nn.params import fingerprint
from seqjax.pretrained import Pretrained
from seqjax.reading import read_json
from seqjax.training.workdir import add_allow_code

LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."
PROMPT = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n{context}\nWhat is the special magic number for {key} mentioned in the provided text?"
)
ANSWER = " The special magic number for {key} mentioned in the provided text is"
NEW_TOKENS = 128  # that the model may write


class Sample(NamedTuple):
    """A prompt, which ends before the number that the model must write, and the number."""

    prompt: str
    value: str


def samples(count: Callable[[str], int], *, length: int, n: int, rng: random.Random) -> Iterator[Sample]:
    """Yield `n` samples of at most `length` tokens, including the answer's.

    Args:
        count: The number of tokens of a text.
        length: Tokens of the prompt without the start of its answer, and `NEW_TOKENS`.
        n: Number of samples.
        rng: Shared by consecutive lengths, as in lm_eval, which seeds it with 0.

    Samples that do not fit are left out. Raises `ValueError` if none fits, and `MissingPackageError` without
    wonderwords.
    """
    words = _words()
    by = 5 if length < 4096 else 25
    n_lines, of_line = by, count(LINE + "\n")
    if count(_draw(random.Random(0), 1, words)[0]) + NEW_TOKENS > length:
        raise ValueError(f"no passkey prompt has {length} tokens with the {NEW_TOKENS} that are written; give more")
    while True:
        text, sample = _draw(rng, n_lines, words)
        # Lines are counted for sure only near the end: counting a long text again and again takes minutes.
        if 1.2 * of_line * n_lines + 1000 < length:
            n_lines += by
            continue
        total = count(f"{text} {sample.value}")
        if total + NEW_TOKENS > length:
            n_lines -= by
            break
        n_lines += by
        if total + NEW_TOKENS == length:
            break
    n_lines = max(n_lines, 1)
    for _ in range(n):
        for lines in range(n_lines, 0, -by):
            text, sample = _draw(rng, lines, words)
            if count(text) + NEW_TOKENS <= length:
                yield sample
                break


def _draw(rng: random.Random, n_lines: int, words: list[str]) -> tuple[str, Sample]:
    """Return the question alone, and the sample."""
    key, value = rng.choice(words), str(rng.randint(10**6, 10**7 - 1))
    lines = [LINE] * n_lines
    lines.insert(rng.sample(range(n_lines), 1)[0], NEEDLE.format(key=key, value=value))
    rng.sample(range(1), 1)  # lm_eval draws an index even for a single key
    text = PROMPT.format(context="\n".join(lines), key=key)
    return text, Sample(text + ANSWER.format(key=key), value)


@functools.cache
def _words() -> list[str]:
    try:
        import wonderwords
    except ModuleNotFoundError:
        raise MissingPackageError(
            "The words of passkey prompts are those of wonderwords: pip install 'seqjax[harness]'."
        ) from None
    known = wonderwords.RandomWord()._categories
    return sorted({f"{adjective}-{noun}" for adjective in known["adjectives"] for noun in known["nouns"]})


def is_right(text: str, value: str) -> bool:
    """Return whether the model has written the number anywhere in its text."""
    return value in text


# Models of 135M trained at 100k tokens, percent of 500 samples each. Of the five lengths only the last, 100k, is
# legible in our copy; rows with four numbers do not show which lengths they belong to.
PAPER = {
    "RWKV-7": (70.80, 14.80, 1.20, 0.00, 0.20),
    "RWKV-7 shell, full attention": (49.80, 25.60, 16.20, 15.80),
    "RWKV-7 shell, W=256": (1.60, 0.40, 0.20, 0.20, 0.40),
    "RWKV-7 shell, Top-1 exact": (49.80, 22.00, 15.00, 11.80),
    "RWKV-7 shell, Top-1 approx": (48.60, 21.40, 21.80, 15.00),
}


def accuracy(m: Pretrained, samples: Sequence[Sample], *, batch_size: int, prefill_chunk: int) -> float:
    """Return the share of samples whose number the model writes; `batch_size` prompts at most go together."""
    prompts = [
        Prompt(
            ids=[m.tokenizer.bos, *encode(m.tokenizer, sample.prompt, vocab_size=m.model.config.vocab_size).tolist()],
            until=(),
            n_new=NEW_TOKENS,
            sampling=Sampling(temperature=0.0),
        )
        for sample in samples
    ]

    def found(i: int, text: str) -> bool:
        return is_right(text, samples[i].value)

    longest = max(len(prompt.ids) for prompt in prompts) + NEW_TOKENS
    batch_tokens = batch_size * bucket_of(longest, longest=m.model.longest)
    texts = generate(m, prompts, batch_tokens=batch_tokens, seed=0, prefill_chunk=prefill_chunk, enough=found)
    return sum(found(i, text) for i, text in enumerate(texts)) / len(samples)


def main(argv: list[str]) -> None:
    """Print and write the accuracy at every length."""
    parser = command_parser("niah", description=__doc__)
    parser.add_argument("--workdir", required=True, type=store.location, help="a run, or a directory of a public model")
    parser.add_argument("--lengths", required=True, help="tokens of the prompts with their answers: 4096,8192")
    parser.add_argument("--samples", type=int, default=500, help="samples of each length (500, as in RULER)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0, as in lm_eval)")
    parser.add_argument("--batch_size", type=int, default=4, help="prompts at a time, at most (4)")
    parser.add_argument("--again", action="store_true", help="measure lengths that have a result already, too")
    parser.add_argument(
        "--prefill_chunk", type=int, default=1024, help="tokens of a prompt fed at a time; 0 = all (1024)"
    )
    add_allow_code(parser)
    args = parser.parse_args(argv)
    lengths = lengths_of(args.lengths)
    for name in ("samples", "batch_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}: give at least 1.")
    m = seqjax.load(args.workdir, allow_code=args.allow_code)
    if m.model.longest and m.model.longest < max(lengths) + 1:
        raise UserError(f"--lengths: this model has a table of {m.model.longest} positions; give shorter ones.")
    path = Path(args.workdir) / "niah.json"
    # Samples follow from the seed and from the lengths before, so only the same lengths have the same samples.
    asked = {"seed": args.seed, "samples": args.samples, "asked": lengths}
    identity = {"step": m.step, "parameters_sha256": fingerprint(m.params)} | asked
    results = {} if args.again else found_before(path, identity, FORM)
    rng = random.Random(args.seed)
    for length in lengths:
        try:
            drawn = list(samples(lambda text: len(m.tokenizer.encode(text)), length=length, n=args.samples, rng=rng))
        except ValueError as error:
            raise UserError(f"--lengths: {error}.") from None
        if str(length) not in results:
            share = accuracy(m, drawn, batch_size=args.batch_size, prefill_chunk=args.prefill_chunk)
            results[str(length)] = {"accuracy": share, "samples": len(drawn)}
            save(path, identity | {"lengths": results})
        share = results[str(length)]["accuracy"]
        sys.stdout.write(f"{length:9,}  {100 * share:6.2f}%  of {len(drawn)}\n")
        sys.stdout.flush()
    sys.stdout.write("The paper's models, at five lengths of which the last is 100k:\n")
    for name, values in PAPER.items():
        sys.stdout.write(f"  {name:30}{''.join(f'{value:8.2f}' for value in values)}\n")


def lengths_of(text: str) -> list[int]:
    """Return the lengths that the text of `--lengths` names."""
    words = [word for word in text.split(",") if word]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--lengths={text}: give numbers of tokens with commas, as in --lengths=4096,8192.")
    return [int(word) for word in words]


# Of niah.json, besides the identity of what was measured.
FORM = {"lengths?": {int: {"accuracy": float, "samples": int}}}


def found_before(path: Path, identity: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    """Return the results by length in a file of this checkpoint and these samples, or none."""
    written = read_json(path, form, fix="delete it, and its lengths are measured again") if path.is_file() else {}
    same = all(written.get(key) == value for key, value in identity.items())
    return written.get("lengths", {}) if same else {}


def save(path: Path, result: dict[str, Any]) -> None:
    """Write results, or say that they cannot be written."""
    try:
        write_json(path, result)
    except OSError as error:  # of a workdir that is only to be read
        sys.stderr.write(f"{path} was not written ({error.strerror}).\n")


if __name__ == "__main__":
    run_command(main)
