"""`seqjax harness`: run lm-evaluation-harness tasks on a model.

    seqjax harness --workdir=runs/x --tasks=local
    seqjax harness --workdir=runs/x --tasks=paper

`paper` selects the thirteen tasks in the paper's table 2 (MMLU with five examples) and the three in table 1 (SWDE,
SQuAD and FDA). Their data comes from the Hugging Face hub. `local` needs no network: its texts are held-out documents
from the built-in corpus. Other tasks are selected by their lm-evaluation-harness names, or as YAML tasks in --include.

Each result is saved when its task ends, in the format of lm-evaluation-harness, with the checkpoint's identity.
table.md compares the results with the paper's numbers. The same command resumes with the missing tasks.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seqjax import store
from seqjax.command_line import command_parser, run_command, words
from seqjax.errors import MissingPackageError, UserError
from seqjax.escape import line
from seqjax.terminal import tell
from seqjax.training import workdir as workdirs

BOOTSTRAP = 1000  # resamples for the standard error of a perplexity; errors of means are computed directly


def main(argv: list[str]) -> None:
    """Measure the tasks; write each result and the table, and print the results."""
    parser = command_parser("harness", description=__doc__)
    workdirs.add_arguments(parser)
    parser.add_argument("--tasks", required=True, type=words, metavar="NAME[,NAME]", help="paper, local, or names")
    parser.add_argument(
        "--include", default=(), type=words, metavar="DIR[,DIR]", help="directories with your own YAML tasks"
    )
    parser.add_argument("--limit", default=0, type=int, help="documents per task; 0 = all, for comparable results (0)")
    parser.add_argument("--num_fewshot", type=int, help="few-shot examples (the paper's number, or the task's default)")
    parser.add_argument("--max_length", default=0, type=int, help="tokens per sequence; 0 = the training length (0)")
    parser.add_argument(
        "--batch_tokens", default=0, type=int, help="tokens per batch; 0 = 16,384, or 4,096 on a CPU (0)"
    )
    parser.add_argument("--out", type=store.location, help="results directory (WORKDIR/harness)")
    parser.add_argument("--again", action="store_true", help="also measure tasks that already have a result")
    args = parser.parse_args(argv)
    for name in ("limit", "num_fewshot", "max_length", "batch_tokens"):
        if (getattr(args, name) or 0) < 0:
            raise UserError(f"--{name} must be at least 0, not {getattr(args, name)}.")
    if not args.tasks:
        raise UserError("--tasks: give paper, local, or task names separated by commas.")
    if args.out is None and store.url_of(args.workdir):
        raise UserError(f"--workdir={args.workdir} is in a store: give a local directory for the results as --out.")
    out = store.local(args.out or Path(args.workdir) / "harness", "--out")
    if args.out is None and out.is_symlink():
        raise UserError(f"{out} is a link to {out.resolve()}: give the results directory as --out.")
    with _as_in_seqjax():
        _run(args, out)


def _run(args: Any, out: Path) -> None:
    try:
        from seqjax.evals.lm_eval import results, table, tasks
        from seqjax.evals.lm_eval.lm import SeqjaxLM
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise MissingPackageError("seqjax harness needs lm_eval: pip install 'seqjax[harness]'.") from None
    names = tasks.expanded(args.tasks)
    include = [store.local(directory, "--include") for directory in args.include]
    manager = tasks.manager(names, include)
    lm = SeqjaxLM(args.workdir, max_length=args.max_length, batch_tokens=args.batch_tokens, allow_code=args.allow_code)
    cache_dir = lm.pretrained.config.data.cache_dir
    if cache_dir and {*names} & {*tasks.LOCAL_TASKS}:
        manager = tasks.manager(names, include, cache_dir=cache_dir)
    info = lm.get_model_info()
    model_identity = {key: info[key] for key in ("step", *results.OF_MODEL)}
    identities = {
        name: model_identity | {"limit": args.limit, "num_fewshot": tasks.fewshot_of(name, args.num_fewshot)}
        for name in names
    }
    _add_texts(identities, tasks.LOCAL_TASKS, cache_dir)
    saved = results.read(out)
    missing = results.to_measure(saved, identities, again=names if args.again else (), out=out)
    for name in names:
        if name in missing:
            result = _measured(lm, manager, name, identities[name])
            saved[name] = results.write(out, name, result, identities[name])
            table.write(out, saved, name=str(args.workdir))
        for v in table.values({name: saved[name]}):
            error = "" if v.stderr is None else f" +- {table.number(v.stderr)}"
            note = "" if name in missing else "  (measured before)"
            sys.stdout.write(
                f"{line(v.task):24} {line(v.metric):16} {table.number(v.value):>10}{error}  of {v.n:,}{note}\n"
            )
        sys.stdout.flush()
    tell(f"Wrote {table.write(out, saved, name=str(args.workdir))}")


def _add_texts(identities: Mapping[str, dict[str, Any]], local: Sequence[str], cache_dir: str) -> None:
    """Add the hash of the built-in corpus to the identities of `local` tasks."""
    for name in identities:
        if name in local:
            from seqjax.evals.lm_eval.local.data import texts_hash

            identities[name]["texts"] = texts_hash(cache_dir)


def _measured(lm: Any, manager: Any, name: str, identity: Mapping[str, Any]) -> Mapping[str, Any]:
    import lm_eval

    evaluate: Any = lm_eval.simple_evaluate  # its decorator hides its arguments from type checkers
    with contextlib.redirect_stdout(sys.stderr):  # most of lm_eval's progress output
        result = evaluate(
            model=lm,
            tasks=[name],
            num_fewshot=identity["num_fewshot"],
            limit=identity["limit"] or None,
            task_manager=manager,
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
        )
    if result is None:
        raise UserError(f"{name}: lm_eval returned nothing; run one process, without LOCAL_RANK.")
    return result


@contextlib.contextmanager
def _as_in_seqjax() -> Iterator[None]:
    """Make lm_eval log only errors, and compute its standard errors in this process.

    lm_eval's process pool would fork this process, in which JAX runs threads.
    """
    logger = logging.getLogger("lm_eval")
    level, previous = logger.level, os.environ.get("DISABLE_MULTIPROC")
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        logger.setLevel(level)
        if previous is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = previous


if __name__ == "__main__":
    run_command(main)
