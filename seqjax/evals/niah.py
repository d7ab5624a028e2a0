"""`seqjax niah`: test whether a model finds one number in a long text.

    seqjax niah --workdir=runs/x --lengths=4096,8192,16384,32768,102400

This is RULER's passkey task (S-NIAH-1; Hsieh et al., arXiv 2404.06654). The text repeats one line; another line states
a number, and the prompt ends with a question about it. A seed gives the same samples as `niah_single_1` in
lm-evaluation-harness 0.4.13 with the same tokenizer: lines, words and numbers come from the same random draws. The
words come from the package wonderwords, as in the harness.

The prompt is prefilled into the cache as in `seqjax generate`, and the answer is decoded greedily. A sample is correct
if the answer contains the number. The accuracies from the paper (arXiv 2505.18522, table 3) are printed for comparison.
Each length's result is saved to niah.json in the workdir, and the same command resumes with the missing lengths.
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
NEW_TOKENS = 128  # maximum tokens per answer


class Sample(NamedTuple):
    """A prompt that ends just before the number, and the number."""

    prompt: str
    value: str


def samples(count: Callable[[str], int], *, length: int, n: int, rng: random.Random) -> Iterator[Sample]:
    """Yield up to `n` samples that fit into `length` tokens, including the answer.

    Args:
        count: Returns the number of tokens in a text.
        length: Maximum of prompt tokens (without the start of the answer) plus `NEW_TOKENS`.
        n: Number of samples.
        rng: One generator for all lengths in sequence, as in lm_eval, which seeds it with 0.

    Samples that do not fit are skipped. Raises `ValueError` if none fits, and `MissingPackageError` without
    wonderwords.
    """
    words = _words()
    increment = 5 if length < 4096 else 25
    n_lines, line_tokens = increment, count(LINE + "\n")
    if count(_draw(random.Random(0), 1, words)[0]) + NEW_TOKENS > length:
        raise ValueError(f"{length} tokens are too few for a prompt and {NEW_TOKENS} answer tokens; give more")
    while True:
        text, sample = _draw(rng, n_lines, words)
        # Count exactly only near the limit: tokenizing a long text at every step takes minutes.
        if 1.2 * line_tokens * n_lines + 1000 < length:
            n_lines += increment
            continue
        total = count(f"{text} {sample.value}")
        if total + NEW_TOKENS > length:
            n_lines -= increment
            break
        n_lines += increment
        if total + NEW_TOKENS == length:
            break
    n_lines = max(n_lines, 1)
    for _ in range(n):
        for lines in range(n_lines, 0, -increment):
            text, sample = _draw(rng, lines, words)
            if count(text) + NEW_TOKENS <= length:
                yield sample
                break


def _draw(rng: random.Random, n_lines: int, words: list[str]) -> tuple[str, Sample]:
    """Draw one sample.

    Returns the prompt without the start of the answer, and the sample.
    """
    key, value = rng.choice(words), str(rng.randint(10**6, 10**7 - 1))
    lines = [LINE] * n_lines
    lines.insert(rng.sample(range(n_lines), 1)[0], NEEDLE.format(key=key, value=value))
    rng.sample(range(1), 1)  # lm_eval draws an index even for a single key; keep the random state equal
    text = PROMPT.format(context="\n".join(lines), key=key)
    return text, Sample(text + ANSWER.format(key=key), value)


@functools.cache
def _words() -> list[str]:
    try:
        import wonderwords
    except ModuleNotFoundError:
        raise MissingPackageError("seqjax niah needs wonderwords: pip install 'seqjax[harness]'.") from None
    categories = wonderwords.RandomWord()._categories
    return sorted({f"{adjective}-{noun}" for adjective in categories["adjectives"] for noun in categories["nouns"]})


def is_right(text: str, value: str) -> bool:
    """Return whether the text contains the number."""
    return value in text


# 135M models trained at 100k tokens; percent correct of 500 samples per length. In our copy of the paper only the last
# of the five lengths, 100k, is legible. Rows with four numbers do not show which lengths they belong to.
PAPER = {
    "RWKV-7": (70.80, 14.80, 1.20, 0.00, 0.20),
    "RWKV-7 shell, full attention": (49.80, 25.60, 16.20, 15.80),
    "RWKV-7 shell, W=256": (1.60, 0.40, 0.20, 0.20, 0.40),
    "RWKV-7 shell, Top-1 exact": (49.80, 22.00, 15.00, 11.80),
    "RWKV-7 shell, Top-1 approx": (48.60, 21.40, 21.80, 15.00),
}


def accuracy(m: Pretrained, samples: Sequence[Sample], *, batch_size: int, prefill_chunk: int) -> float:
    """Return the fraction of correctly answered samples.

    A batch has at most `batch_size` prompts.
    """
    prompts = [
        Prompt(
            ids=[m.tokenizer.bos, *encode(m.tokenizer, sample.prompt, vocab_size=m.model.config.vocab_size).tolist()],
            until=(),
            n_new=NEW_TOKENS,
            sampling=Sampling(temperature=0.0),
        )
        for sample in samples
    ]

    def is_answered(i: int, text: str) -> bool:
        return is_right(text, samples[i].value)

    longest = max(len(prompt.ids) for prompt in prompts) + NEW_TOKENS
    batch_tokens = batch_size * bucket_of(longest, longest=m.model.longest)
    texts = generate(m, prompts, batch_tokens=batch_tokens, seed=0, prefill_chunk=prefill_chunk, enough=is_answered)
    return sum(is_answered(i, text) for i, text in enumerate(texts)) / len(samples)


def main(argv: list[str]) -> None:
    """Measure, print and save the accuracy at each length."""
    parser = command_parser("niah", description=__doc__)
    parser.add_argument("--workdir", required=True, type=store.location, help="a run, or a directory of a public model")
    parser.add_argument("--lengths", required=True, help="prompt plus answer lengths in tokens: 4096,8192")
    parser.add_argument("--samples", type=int, default=500, help="samples per length (500, as in RULER)")
    parser.add_argument("--seed", type=int, default=0, help="sample seed (0, as in lm_eval)")
    parser.add_argument("--batch_size", type=int, default=4, help="maximum number of prompts per batch (4)")
    parser.add_argument("--again", action="store_true", help="also measure lengths that already have a result")
    parser.add_argument(
        "--prefill_chunk", type=int, default=1024, help="prompt tokens per prefill call; 0 = all (1024)"
    )
    add_allow_code(parser)
    args = parser.parse_args(argv)
    lengths = lengths_of(args.lengths)
    for name in ("samples", "batch_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)}: give at least 1.")
    m = seqjax.load(args.workdir, allow_code=args.allow_code)
    if m.model.longest and m.model.longest < max(lengths) + 1:
        raise UserError(f"--lengths: the model's position table has {m.model.longest} entries; give shorter lengths.")
    path = Path(args.workdir) / "niah.json"
    # A length's samples depend on the seed and on all earlier lengths, so results are reused only for equal lists.
    settings = {"seed": args.seed, "samples": args.samples, "asked": lengths}
    identity = {"step": m.step, "parameters_sha256": fingerprint(m.params)} | settings
    results = {} if args.again else saved_results(path, identity, FORM)
    rng = random.Random(args.seed)
    for length in lengths:
        try:
            drawn = list(samples(lambda text: len(m.tokenizer.encode(text)), length=length, n=args.samples, rng=rng))
        except ValueError as error:
            raise UserError(f"--lengths: {error}.") from None
        if str(length) not in results:
            result = accuracy(m, drawn, batch_size=args.batch_size, prefill_chunk=args.prefill_chunk)
            results[str(length)] = {"accuracy": result, "samples": len(drawn)}
            save(path, identity | {"lengths": results})
        sys.stdout.write(f"{length:9,}  {100 * results[str(length)]['accuracy']:6.2f}%  of {len(drawn)}\n")
        sys.stdout.flush()
    sys.stdout.write("The paper's models at five lengths (the last is 100k):\n")
    for name, values in PAPER.items():
        sys.stdout.write(f"  {name:30}{''.join(f'{value:8.2f}' for value in values)}\n")


def lengths_of(text: str) -> list[int]:
    """Parse `--lengths`; raise `UserError` unless it has positive integers."""
    words = [word for word in text.split(",") if word]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--lengths={text}: give token counts separated by commas, as in --lengths=4096,8192.")
    return [int(word) for word in words]


# Form of niah.json, in addition to the identity keys.
FORM = {"lengths?": {int: {"accuracy": float, "samples": int}}}


def saved_results(path: Path, identity: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    """Return the saved results by length.

    The result is {} if the file does not exist or has another `identity`.
    """
    saved = read_json(path, form, fix="delete it, and its lengths are measured again") if path.is_file() else {}
    is_same = all(saved.get(key) == value for key, value in identity.items())
    return saved.get("lengths", {}) if is_same else {}


def save(path: Path, result: dict[str, Any]) -> None:
    """Write the results, or print a notice if the file cannot be written."""
    try:
        write_json(path, result)
    except OSError as error:  # such as a read-only workdir
        sys.stderr.write(f"{path} was not written ({error.strerror}).\n")


if __name__ == "__main__":
    run_command(main)
