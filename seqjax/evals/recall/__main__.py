"""`seqjax recall`: train small models of every mixer on recall and state-tracking tasks, in minutes each.

    seqjax recall --size=demo                                  two CPU cores
    seqjax recall --size=small --jobs=4 --out=runs/recall      four GPUs, or four processes on one
    seqjax recall --size=demo --models="Transformer++,Mamba-2" --tasks=mqar,s5
    seqjax recall --size=small --seeds=3 --widths=128      three seeds at the best rate, at one width
    seqjax recall --size=small --report                    the report of what is there; nothing is trained

Every model is trained on every task for every width and learning rate of the size, ordered by width and rate. Further
seeds follow, at the rate that is best on sequences that no test has, compared on the seeds that all rates have. Each
file in seqjax/evals/recall/tasks is a task with its source and its sizes; setups.py has the models, widths and rates. A
run's result is a line of OUT/runs.jsonl, added as it ends. Finished runs are not repeated, so the same command resumes
after an interruption. report.md and accuracy.png are written from all results in OUT.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqjax import store
from seqjax.command_line import command_parser, run_command
from seqjax.errors import UserError, nearest
from seqjax.evals.recall import report
from seqjax.evals.recall.setups import MODELS, SETUPS, Setup, is_file
from seqjax.evals.recall.tasks import kinds
from seqjax.evals.recall.train import code_of, train
from seqjax.study.runs.runner import visible_gpus
from seqjax.terminal import duration, tell
from seqjax.training.origin import RULES
from seqjax.training.processes import use_compile_cache


def main(argv: list[str]) -> None:
    """Train the runs without a result, and write the report."""
    names = ", ".join(kind.name for kind in kinds())
    parser = command_parser("recall", description=__doc__)
    parser.add_argument("--size", required=True, help=" or ".join(SETUPS))
    parser.add_argument(
        "--models",
        default="",
        help=f"labels, or FILE.py[:SETTINGS] of your own, with ; or , between them: {'; '.join(MODELS)} (all)",
    )
    parser.add_argument("--tasks", default="", help=f"names with commas, of {names} (all of the size)")
    parser.add_argument("--widths", default="", help="numbers with commas, of the widths of the size (all)")
    parser.add_argument("--out", default="runs/recall", help="where results go (runs/recall)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds, from 0 on, those after 0 at the best rate (1)")
    parser.add_argument(
        "--together", type=int, default=1, help="runs of a model and task, of several rates and seeds, in a program (1)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a GPU if there are any (1)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after so many, no further run is started")
    parser.add_argument("--report", action="store_true", help="write the report of what is there, and train nothing")
    parser.add_argument("--foretell", action="append", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.foretell:
        given = {"size": [args.size], "models": [args.models] * bool(args.models), "out": [args.out]}
        words = [f"--{name}={value}" for name, values in (given | {"study": args.foretell}).items() for value in values]
        raise UserError(f"--foretell has moved. Run this in a clone: python -m lab.foretell {shlex.join(words)}")
    setup = SETUPS[known("size", [args.size], SETUPS)[0]]
    named = labels(args.models)
    models = known("models", named, [*MODELS, *filter(is_file, named)])
    tasks = known("tasks", [word for word in args.tasks.split(",") if word], [task.name for task in setup.tasks])
    dims = [str(dim) for dim in dict.fromkeys(dim for dim, _ in setup.rounds)]
    widths = known("widths", [word for word in args.widths.split(",") if word], dims)
    for option, given in (("jobs", args.jobs), ("seeds", args.seeds), ("together", args.together)):
        if given < 1:
            raise UserError(f"--{option}={given}: give at least 1.")
    out = store.local(args.out, "--out")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file; give a directory.")
    require_asked(setup, out)
    _require_same_code(models, out)
    setup = dataclasses.replace(setup, rounds=tuple(pair for pair in setup.rounds if str(pair[0]) in widths))
    until = time.time() + 60 * args.minutes
    claims = os.environ.get(_CHILD)
    if claims:
        # The process that started this one reports on all.
        runs = list(_runs(setup, models, tasks, seeds=args.seeds, found=report.results(out)))
        _train(setup, runs, out, until=until, together=args.together, claims=Path(claims))
        return
    failed = 0
    for seeds in [] if args.report else sorted({1, args.seeds}):  # the first seed tells the rate of the others
        runs = list(_runs(setup, models, tasks, seeds=seeds, found=report.results(out)))
        if missing := {*runs} - _done(out):
            _require_rules(out)
            out.mkdir(parents=True, exist_ok=True)
            (out / report.RESULTS).open("ab").close()  # Fail before the training if it cannot be written.
        jobs = min(args.jobs, len(missing))
        if jobs > 1:
            command = [f"--size={args.size}", f"--models={';'.join(models)}", f"--tasks={','.join(tasks)}"]
            command += [f"--widths={','.join(widths)}", f"--seeds={seeds}", f"--together={args.together}"]
            failed += _in_processes([*command, f"--out={out}"], runs, out, until=until, jobs=jobs)
        else:
            _train(setup, runs, out, until=until, together=args.together)
    written = report.write(out, setup.tasks, title=f"Recall and state, size {args.size}")
    if args.report and not written:
        raise UserError(
            f"{out / report.RESULTS} has no result to report; without --report the command trains the runs."
        )
    tell(f"Wrote {written}" if written else f"No results in {out}")
    if failed:
        raise UserError(f"{failed} runs failed, see above; the same command goes on with what is missing.")


_CHILD = "SEQJAX_RECALL_CLAIMS"  # in the processes that `--jobs` starts: the directory of files named for runs taken


class Run(NamedTuple):
    """One model, trained on a task with a width, a learning rate and a seed: fields of its result."""

    model: str
    task: str
    dim: int
    rate: float
    seed: int


def _runs(
    setup: Setup,
    models: Sequence[str],
    tasks: Sequence[str],
    *,
    seeds: int = 1,
    found: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Run]:
    """Yield all runs: all models with one width and rate first, so that an early end leaves a table.

    Seeds after the first are those of the best rate, where `found` has all rates of the first seed. The rate is that
    of the report, so that no seed is run at another.
    """
    for (dim, rate), task, model in itertools.product(setup.rounds, tasks, models):
        yield Run(model, task, dim, rate, 0)
    of_width: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for result in found:
        of_width.setdefault((result["model"], result["task"], result["dim"]), []).append(result)
    for seed, task, model in itertools.product(range(1, seeds), tasks, models):
        for dim in dict.fromkeys(dim for dim, _ in setup.rounds):
            results = of_width.get((model, task, dim), [])
            first = {result["rate"] for result in results if result["seed"] == 0}
            if first >= {rate for width, rate in setup.rounds if width == dim}:
                asked = setup.task(task)
                by = "score" if asked.kind.score else "accuracy"
                yield Run(model, task, dim, report.validated_rate(results, asked.own, by), seed)


def _done(out: Path) -> set[Run]:
    """Return the runs that have a result."""
    return {Run(*(result[field] for field in Run._fields)) for result in report.results(out)}


def labels(text: str) -> list[str]:
    """Return the labels in `text`, between commas or semicolons; some hold a comma themselves."""
    found, rest = [], text.strip()
    while rest:
        fitting = [label for label in MODELS if rest == label or rest.startswith((f"{label},", f"{label};"))]
        label = max(fitting, key=len) if fitting else rest.partition(",")[0]
        found.append(label)
        rest = rest[len(label) :].lstrip(",; ")
    return found


def known(option: str, given: list[str], names: Iterable[str]) -> list[str]:
    """Return the given names, or all if there are none; raise `UserError` for an unknown name."""
    every = list(names)
    for word in given:
        if word not in every:
            raise UserError(f"--{option}={word}: there is no such thing.{nearest(word, every)}")
    return given or every


def require_asked(setup: Setup, out: Path) -> None:
    """Raise `UserError` if a result is of another size, or the task's sequences, tests or steps have changed."""
    asked = {task.name: setup.asked(task.name) for task in setup.tasks}
    for result in report.results(out):
        if asked.get(result["task"]) != result["asked"]:
            raise UserError(
                f"{out / report.RESULTS} holds results of {result['task']} of another --size, or with other sequences, "
                "tests or steps than now; give another --out, or delete those lines."
            )


def _require_same_code(models: Sequence[str], out: Path) -> None:
    """Raise `UserError` if a config in a file of the user cannot be read, or had another mixer in an earlier result."""
    for model in filter(is_file, models):
        code = code_of(model)
        if any(result.get("mixers", {}) != code for result in report.results(out) if result["model"] == model):
            raise UserError(
                f"{out / report.RESULTS} holds results of {model} with other code than its mixer has now; give another "
                "--out, or delete those lines."
            )


def _require_rules(out: Path) -> None:
    """Raise `UserError` if a result was made by other rules than now, which further results would not compare with."""
    if any(result.get("rules", 1) != RULES for result in report.results(out)):
        raise UserError(
            f"{out / report.RESULTS} holds results with an earlier rule for weight decay and the score of `capacity`, "
            "and new ones do not compare with them; give another --out. --report reads them."
        )


def _train(
    setup: Setup, runs: Sequence[Run], out: Path, *, until: float, together: int = 1, claims: Path | None = None
) -> None:
    """Train the runs without a result, starting none after `until`; with `claims`, skip runs of other processes."""
    use_compile_cache()
    begun, done = time.time(), _done(out)
    before = len(done)
    for group in _groups([run for run in runs if run not in done], together):
        if time.time() > until:
            return
        done = _done(out)
        taken = [run for run in group if run not in done and not (claims and not _taken(claims / _claim(run)))]
        if not taken:
            continue
        first, settings = taken[0], [(run.rate, run.seed) for run in taken]
        results = train(
            MODELS.get(first.model, first.model), setup.task(first.task), setup, dim=first.dim, runs=settings
        )
        for run, result in zip(taken, results, strict=True):
            _append(out, {"model": run.model, "task": run.task, "asked": setup.asked(run.task), **result})
        done = _done(out)  # other processes' as well
        n_left = len(set(runs) - done)
        left = duration((time.time() - begun) / (len(done) - before) * n_left)
        for run, result in zip(taken, results, strict=True):
            tests = "  ".join(f"{test} {values['accuracy']:.1%}" for test, values in result["tests"].items())
            settings = f"width {run.dim} rate {run.rate:g} seed {run.seed}"
            sys.stdout.write(
                f"{run.task:14} {run.model:24} {settings}  {tests}  {result['seconds']:.0f} s"
                f"  ({n_left} of {len(runs)} left, about {left})\n"
            )
        sys.stdout.flush()


def _groups(runs: Sequence[Run], together: int) -> list[list[Run]]:
    """Return the runs in groups of one model, task and width, in the order of the first of each."""
    alike: dict[tuple[str, str, int], list[list[Run]]] = {}
    groups = []
    for run in runs:
        of_model = alike.setdefault(run[:3], [])
        if not of_model or len(of_model[-1]) == together:
            of_model.append([])
            groups.append(of_model[-1])
        of_model[-1].append(run)
    return groups


def _append(out: Path, result: Mapping[str, Any]) -> None:
    """Append a line to the results in a single write, because other processes append at the same time."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / report.RESULTS).open("ab", buffering=0) as file:
        file.write(f"{json.dumps(result)}\n".encode())


def _claim(run: Run) -> str:
    return "_".join(map(str, run)).replace("/", "_")


def _taken(path: Path) -> bool:
    """Create a file, and return whether it did not exist before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _in_processes(arguments: Sequence[str], runs: Sequence[Run], out: Path, *, until: float, jobs: int) -> int:
    """Train in several processes, which take one run after another and end with this process.

    Return the number of failed runs. A failed process is replaced while there are untaken runs.
    """
    with tempfile.TemporaryDirectory() as claims:
        children = [_start(arguments, claims, until=until, slot=slot, jobs=jobs) for slot in range(jobs)]
        failed = 0
        codes: list[int | None] = [None]
        try:
            while None in codes:
                time.sleep(0.5)
                codes = [child.poll() for child in children]
                done = _done(out)
                left = any(run not in done and not (Path(claims) / _claim(run)).exists() for run in runs)
                for slot, code in enumerate(codes):
                    if code and left and time.time() < until:
                        failed += 1
                        children[slot] = _start(arguments, claims, until=until, slot=slot, jobs=jobs)
                        codes[slot] = None
        finally:
            for child in children:
                child.terminate()
                child.wait()
        return failed + sum(child.returncode != 0 for child in children)


def _start(arguments: Sequence[str], claims: str, *, until: float, slot: int, jobs: int) -> subprocess.Popen[bytes]:
    """Start a process on one of the GPUs, with its share of the memory if there are fewer GPUs than processes."""
    environment, gpus = os.environ | {_CHILD: claims}, visible_gpus()
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        share = 0.9 / -(-jobs // len(gpus))
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.2f}")
    command = [sys.executable, "-m", "seqjax.evals.recall", *arguments, f"--minutes={(until - time.time()) / 60}"]
    return subprocess.Popen(command, env=environment)


if __name__ == "__main__":
    run_command(main)
