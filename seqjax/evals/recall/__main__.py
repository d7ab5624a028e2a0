"""`seqjax recall`: train small models on recall and state-tracking tasks.

    seqjax recall --size=demo                                  two CPU cores
    seqjax recall --size=small --jobs=4 --out=runs/recall      four GPUs, or four processes on one
    seqjax recall --size=demo --models="Transformer++,Mamba-2" --tasks=mqar,s5
    seqjax recall --size=small --seeds=3 --widths=128      three seeds at the best rate, at one width
    seqjax recall --size=small --report                    report the existing results; train nothing

Each model trains on each task, for each width and learning rate of the size. All models run at one width and rate
before the next. Additional seeds then run at the best rate. The best rate has the best result on validation sequences,
which are in no test, averaged over the seeds that all rates share. Each file in seqjax/evals/recall/tasks defines a
task, its source and its sizes; setups.py defines models, widths and rates. A finished run adds a line to
OUT/runs.jsonl. Finished runs are not repeated, so the same command resumes after an interruption. report.md and
accuracy.png show all results in OUT.
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
    """Train all runs that have no result, and write the report."""
    names = ", ".join(kind.name for kind in kinds())
    parser = command_parser("recall", description=__doc__)
    parser.add_argument("--size", required=True, help=" or ".join(SETUPS))
    parser.add_argument(
        "--models",
        default="",
        help=f"labels, or your own FILE.py[:SETTINGS], separated by ; or ,: {'; '.join(MODELS)} (all)",
    )
    parser.add_argument("--tasks", default="", help=f"task names separated by commas: {names} (all of the size)")
    parser.add_argument("--widths", default="", help="model widths separated by commas (all of the size)")
    parser.add_argument("--out", default="runs/recall", help="results directory (runs/recall)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds; seeds above 0 use the best rate (1)")
    parser.add_argument(
        "--together", type=int, default=1, help="runs per program: rates and seeds of a model and task (1)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a GPU if there are any (1)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this many minutes")
    parser.add_argument("--report", action="store_true", help="only write the report of existing results")
    parser.add_argument("--foretell", action="append", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.foretell:
        options = {"size": [args.size], "models": [args.models] * bool(args.models), "out": [args.out]}
        options["study"] = args.foretell
        words = [f"--{name}={value}" for name, values in options.items() for value in values]
        raise UserError(f"--foretell has moved. Run this in a clone: python -m lab.foretell {shlex.join(words)}")
    setup = SETUPS[known("size", [args.size], SETUPS)[0]]
    requested = labels(args.models)
    models = known("models", requested, [*MODELS, *filter(is_file, requested)])
    tasks = known("tasks", [word for word in args.tasks.split(",") if word], [task.name for task in setup.tasks])
    dims = [str(dim) for dim in dict.fromkeys(dim for dim, _ in setup.rounds)]
    widths = known("widths", [word for word in args.widths.split(",") if word], dims)
    for option, value in (("jobs", args.jobs), ("seeds", args.seeds), ("together", args.together)):
        if value < 1:
            raise UserError(f"--{option}={value}: give at least 1.")
    out = store.local(args.out, "--out")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file; give a directory.")
    require_same_settings(setup, out)
    _require_same_code(models, out)
    setup = dataclasses.replace(setup, rounds=tuple(pair for pair in setup.rounds if str(pair[0]) in widths))
    until = time.time() + 60 * args.minutes
    claims = os.environ.get(_CHILD)
    if claims:
        # Only the parent process writes the report.
        runs = list(_runs(setup, models, tasks, seeds=args.seeds, finished=report.results(out)))
        _train(setup, runs, out, until=until, together=args.together, claims=Path(claims))
        return
    failed = 0
    for seeds in [] if args.report else sorted({1, args.seeds}):  # the first seed determines the rate for further seeds
        runs = list(_runs(setup, models, tasks, seeds=seeds, finished=report.results(out)))
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
        raise UserError(f"{out / report.RESULTS} has no results to report. Train the runs first, without --report.")
    tell(f"Wrote {written}" if written else f"No results in {out}")
    if failed:
        raise UserError(f"{failed} runs failed, see above. Repeat the command to train the missing runs.")


_CHILD = "SEQJAX_RECALL_CLAIMS"  # set in `--jobs` child processes: directory with one file per claimed run


class Run(NamedTuple):
    """One training run; the fields are keys of its result."""

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
    finished: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Run]:
    """Yield all runs.

    All models at one width and rate come first, so an early stop leaves a complete table. Further seeds run only at the
    best rate, and only if the `finished` results have the first seed at all rates. The best rate is chosen by
    `report.validated_rate`, as in the report.
    """
    for (dim, rate), task, model in itertools.product(setup.rounds, tasks, models):
        yield Run(model, task, dim, rate, 0)
    by_width: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for result in finished:
        by_width.setdefault((result["model"], result["task"], result["dim"]), []).append(result)
    for seed, task, model in itertools.product(range(1, seeds), tasks, models):
        for dim in dict.fromkeys(dim for dim, _ in setup.rounds):
            results = by_width.get((model, task, dim), [])
            first_seed_rates = {result["rate"] for result in results if result["seed"] == 0}
            if first_seed_rates >= {rate for width, rate in setup.rounds if width == dim}:
                task_setup = setup.task(task)
                by = "score" if task_setup.kind.score else "accuracy"
                yield Run(model, task, dim, report.validated_rate(results, task_setup.own, by), seed)


def _done(out: Path) -> set[Run]:
    """Return the runs that already have a result."""
    return {Run(*(result[field] for field in Run._fields)) for result in report.results(out)}


def labels(text: str) -> list[str]:
    """Split `text` into labels at commas or semicolons.

    Labels that contain commas stay whole.
    """
    parsed, rest = [], text.strip()
    while rest:
        matches = [label for label in MODELS if rest == label or rest.startswith((f"{label},", f"{label};"))]
        label = max(matches, key=len) if matches else rest.partition(",")[0]
        parsed.append(label)
        rest = rest[len(label) :].lstrip(",; ")
    return parsed


def known(option: str, requested: list[str], names: Iterable[str]) -> list[str]:
    """Return `requested`, or all `names` if it is empty.

    Raises `UserError` for an unknown name.
    """
    every = list(names)
    for word in requested:
        if word not in every:
            raise UserError(f"--{option}={word} is unknown.{nearest(word, every)}")
    return requested or every


def require_same_settings(setup: Setup, out: Path) -> None:
    """Raise `UserError` if a result has other sequences, tests, steps or size."""
    hashes = {task.name: setup.settings_hash(task.name) for task in setup.tasks}
    for result in report.results(out):
        if hashes.get(result["task"]) != result["asked"]:
            raise UserError(
                f"{out / report.RESULTS} has results for {result['task']} at another --size, or with other sequences, "
                "tests or steps. Give another --out, or delete these lines."
            )


def _require_same_code(models: Sequence[str], out: Path) -> None:
    """Raise `UserError` if a user's mixer code has changed since earlier results.

    It also raises `UserError` if the config file is unreadable.
    """
    for model in filter(is_file, models):
        code = code_of(model)
        if any(result.get("mixers", {}) != code for result in report.results(out) if result["model"] == model):
            raise UserError(
                f"{out / report.RESULTS} has results for {model} from before its mixer's code changed. Give another "
                "--out, or delete these lines."
            )


def _require_rules(out: Path) -> None:
    """Raise `UserError` if a result was made with other training rules.

    New results would not be comparable.
    """
    if any(result.get("rules", 1) != RULES for result in report.results(out)):
        raise UserError(
            f"{out / report.RESULTS} has results with earlier training rules (weight decay, the score of `capacity`), "
            "which are not comparable with new results. Give another --out, or read these results with --report."
        )


def _train(
    setup: Setup, runs: Sequence[Run], out: Path, *, until: float, together: int = 1, claims: Path | None = None
) -> None:
    """Train the runs that have no result.

    No run starts after `until` (seconds since the epoch). `claims` is the directory of claimed runs; with it, runs
    claimed by other processes are skipped.
    """
    use_compile_cache()
    start, done = time.time(), _done(out)
    n_before = len(done)
    for group in _groups([run for run in runs if run not in done], together):
        if time.time() > until:
            return
        done = _done(out)
        claimed = [run for run in group if run not in done and not (claims and not _claimed(claims / _claim(run)))]
        if not claimed:
            continue
        first, settings = claimed[0], [(run.rate, run.seed) for run in claimed]
        results = train(
            MODELS.get(first.model, first.model), setup.task(first.task), setup, dim=first.dim, runs=settings
        )
        for run, result in zip(claimed, results, strict=True):
            _append(out, {"model": run.model, "task": run.task, "asked": setup.settings_hash(run.task), **result})
        done = _done(out)  # including runs from other processes
        n_left = len(set(runs) - done)
        left = duration((time.time() - start) / (len(done) - n_before) * n_left)
        for run, result in zip(claimed, results, strict=True):
            tests = "  ".join(f"{test} {values['accuracy']:.1%}" for test, values in result["tests"].items())
            settings = f"width {run.dim} rate {run.rate:g} seed {run.seed}"
            sys.stdout.write(
                f"{run.task:14} {run.model:24} {settings}  {tests}  {result['seconds']:.0f} s"
                f"  ({n_left} of {len(runs)} left, about {left})\n"
            )
        sys.stdout.flush()


def _groups(runs: Sequence[Run], together: int) -> list[list[Run]]:
    """Group up to `together` runs with equal model, task and width.

    Groups keep the order of their first runs.
    """
    by_key: dict[tuple[str, str, int], list[list[Run]]] = {}
    groups = []
    for run in runs:
        same_key = by_key.setdefault(run[:3], [])
        if not same_key or len(same_key[-1]) == together:
            same_key.append([])
            groups.append(same_key[-1])
        same_key[-1].append(run)
    return groups


def _append(out: Path, result: Mapping[str, Any]) -> None:
    """Append a result line in one write; other processes append concurrently."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / report.RESULTS).open("ab", buffering=0) as file:
        file.write(f"{json.dumps(result)}\n".encode())


def _claim(run: Run) -> str:
    return "_".join(map(str, run)).replace("/", "_")


def _claimed(path: Path) -> bool:
    """Claim a run: create its file, and return whether it did not exist before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _in_processes(arguments: Sequence[str], runs: Sequence[Run], out: Path, *, until: float, jobs: int) -> int:
    """Train in `jobs` child processes, and return the number of failed runs.

    Each process claims one run after another. A failed process is replaced while unclaimed runs remain. The children
    are terminated with this process.
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
    """Start a child process, on a GPU if there is one.

    Processes on the same GPU share its memory equally.
    """
    environment, gpus = os.environ | {_CHILD: claims}, visible_gpus()
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        share = 0.9 / -(-jobs // len(gpus))
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.2f}")
    command = [sys.executable, "-m", "seqjax.evals.recall", *arguments, f"--minutes={(until - time.time()) / 60}"]
    return subprocess.Popen(command, env=environment)


if __name__ == "__main__":
    run_command(main)
