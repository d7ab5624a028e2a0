"""Continue texts with a run: `seqjax generate --workdir=DIR --prompt="Once"`.

Text is printed on standard output as it is generated, and the speed on standard error. The prompt is prefilled into the
decoding cache in chunks.
"""

import sys
from pathlib import Path

import jax

from seqjax import store
from seqjax.command_line import command_parser
from seqjax.data.tokenizer import load_tokenizer
from seqjax.decoding import PREFILL_CHUNK, Sampling, Timing, stream
from seqjax.errors import UserError, first_line, is_out_of_memory
from seqjax.escape import terminal
from seqjax.files import is_text
from seqjax.reading import parse_json
from seqjax.terminal import StatusLine
from seqjax.training import workdir as workdirs
from seqjax.training.evaluate import restore


def read_prompts(path: str | Path) -> list[str]:
    """Return the prompts in a file.

    Prompts are the lines, or the field `prompt` of each .jsonl line. Empty lines are skipped. Raises `UserError` with
    the line number if the file does not hold prompts.
    """
    path = store.local(path, "--prompts")
    if not path.is_file():
        raise UserError(f"--prompts={path}: no such file; give a text file with a prompt per line, or a .jsonl file.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts={path} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    numbered = [(i, line.removesuffix("\r")) for i, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"--prompts={path} holds no prompt: write one per line.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    prompts = []
    for i, line in numbered:
        fix = 'write {"prompt": "..."}, or name a file of plain lines .txt'
        prompts.append(parse_json(line, {"prompt": str}, f"{path}, line {i}", fix=fix)["prompt"])
    return prompts


def main(argv: list[str]) -> None:
    """Print each prompt and its continuation."""
    parser = command_parser("generate", description=__doc__)
    workdirs.add_arguments(parser)
    parser.add_argument("--prompt", help="text to continue; by default a new document")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='text file with a prompt per line, or .jsonl file with {"prompt": "..."} per line',
    )
    parser.add_argument("--max_new_tokens", default=200, type=int, help="maximum; fewer if the document ends (200)")
    parser.add_argument("--temperature", default=0.8, type=float, help="0 takes the most likely token (0.8)")
    parser.add_argument("--top_k", default=0, type=int, help="sample from the k most likely tokens; 0 = all (0)")
    parser.add_argument(
        "--top_p",
        default=1.0,
        type=float,
        help="sample from the smallest token set with at least this total probability; 1 = all (1)",
    )
    parser.add_argument("--seed", default=0, type=int, help="sampling seed, the same for all prompts (0)")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be repeated",
    )
    parser.add_argument(
        "--prefill_chunk",
        default=PREFILL_CHUNK,
        type=int,
        help=f"prompt tokens per prefill call; 0 = all ({PREFILL_CHUNK})",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.seed < 1 << 32:
        raise UserError(f"seed must be at least 0 and less than {1 << 32}, not {args.seed}.")
    if args.max_new_tokens >= 1 << 31:
        raise UserError(f"max_new_tokens must be less than {1 << 31}, not {args.max_new_tokens}.")
    if args.prompts and args.prompt is not None:
        raise UserError("--prompt and --prompts: give one of them.")
    if not all(map(is_text, (args.prompt or "", *args.stop))):
        raise UserError("--prompt and --stop must be UTF-8 text; correct the text, or give the shell a UTF-8 locale.")
    prompts = read_prompts(args.prompts) if args.prompts else [args.prompt or ""]
    config, model, params, step, mesh = restore(args.workdir, allow_code=args.allow_code)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    StatusLine().say(f"compiling the model: step {step} of {args.workdir}")  # takes up to a minute
    for i, prompt in enumerate(prompts, start=1):
        timing = Timing()
        parts = stream(
            model,
            params,
            tokenizer,
            prompt,
            jax.random.key(args.seed),
            n_new=args.max_new_tokens,
            sampling=Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p),
            stop=args.stop,
            prefill_chunk=args.prefill_chunk,
            mesh=mesh,
            timing=timing,
        )
        if args.prompts:
            sys.stdout.write(f"--- prompt {i} of {len(prompts)}\n")
        # A terminal would obey control characters in the text, so they are escaped there, not in a file.
        shown = terminal if sys.stdout.isatty() else str
        sys.stdout.write(shown(prompt))
        sys.stdout.flush()
        try:
            for part in parts:
                sys.stdout.write(shown(part))
                sys.stdout.flush()
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"--max_new_tokens={args.max_new_tokens} with this prompt needs more memory than the device has "
                f"({first_line(error)}); give fewer, or a shorter prompt."
            ) from error
        sys.stdout.write("\n")
        sys.stdout.flush()
        sys.stderr.write(f"{timing}\n")
