"""`seqjax recall`: what small models of every mixer look up and track, in minutes each.

    seqjax recall --size=demo                                  two CPU cores
    seqjax recall --size=small --jobs=4 --out=runs/recall      four GPUs, or four processes on one
    seqjax recall --size=demo --models="Transformer++,Mamba-2" --tasks=mqar,s5

Every model is trained on every task for every width and learning rate of the size. seqjax/harness/recall/tasks.py has
the tasks with their sources, setups.py the sizes. A run's result goes to OUT/runs/TASK/MODEL_WIDTH_RATE.json, and runs
that have one are not repeated, so the same command goes on after an interruption. report.md and accuracy.png are
written from all results in OUT.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from seqjax.arguments import command_parser
from seqjax.errors import UserError, nearest, run_command
from seqjax.files import write_json
from seqjax.harness.recall import report
from seqjax.harness.recall.setups import MODELS, SETUPS, Setup
from seqjax.harness.recall.train import train
from seqjax.study.runner import visible_gpus


def main(argv: list[str]) -> None:
    """Train what has no result yet, and write the report."""
    parser = command_parser("recall", description=__doc__)
    parser.add_argument("--size", required=True, help=" or ".join(SETUPS))
    parser.add_argument("--models", default="", help=f"labels with ; or , between them: {'; '.join(MODELS)} (all)")
    parser.add_argument("--tasks", default="", help="names with commas: mqar,s5 (all)")
    parser.add_argument("--out", default="runs/recall", help="where results go (runs/recall)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a GPU if there are any (1)")
    args = parser.parse_args(argv)
    setup = SETUPS[_known("size", [args.size], SETUPS)[0]]
    models = _known("models", _labels(args.models), MODELS)
    tasks = _known("tasks", [word for word in args.tasks.split(",") if word], [task.name for task in setup.tasks])
    if args.jobs < 1:
        raise UserError(f"--jobs={args.jobs}: give at least 1.")
    out = Path(args.out)
    _require_same(out / "size.json", args.size)
    if args.jobs > 1:
        _in_processes(args.size, models, tasks, out, jobs=min(args.jobs, len(models)))
    else:
        for name in tasks:
            for model in models:
                _run(model, name, setup, out)
    if os.environ.get(_CHILD):
        return  # The process that started this one reports on all.
    written = report.write(out, setup.tasks, title=f"Recall and state, size {args.size}")
    if written:
        sys.stdout.write(f"Wrote {written}\n")


_CHILD = "SEQJAX_RECALL_CHILD"  # set in the processes that `--jobs` starts


def _labels(text: str) -> list[str]:
    """Return the labels in `text`, between commas or semicolons; some hold a comma themselves."""
    labels, rest = [], text.strip()
    while rest:
        known = [label for label in MODELS if rest == label or rest.startswith((f"{label},", f"{label};"))]
        label = max(known, key=len) if known else rest.partition(",")[0]
        labels.append(label)
        rest = rest[len(label) :].lstrip(",; ")
    return labels


def _known(option: str, given: list[str], known) -> list[str]:
    """Return what was given, or all if nothing was; raise `UserError` for what is not known."""
    for word in given:
        if word not in known:
            raise UserError(f"--{option}={word}: there is no such thing.{nearest(word, list(known))}")
    return given or list(known)


def _require_same(path: Path, size: str) -> None:
    """Write the size of the results in a directory; raise `UserError` if it holds those of another."""
    if path.exists() and path.read_text(encoding="utf-8").strip() != f'"{size}"':
        raise UserError(f"{path.parent} holds results of another size; give another --out.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, size)


def _run(model: str, name: str, setup: Setup, out: Path) -> None:
    """Train a model on a task for every width and rate that has no result yet."""
    task = setup.task(name)
    for dim in setup.dims:
        for rate in setup.rates:
            slug = "".join(c if c.isalnum() else "-" for c in model.lower()).replace("--", "-")
            path = out / "runs" / name / f"{slug}_{dim}_{rate:g}.json"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            result = train(MODELS[model], task, setup, dim=dim, rate=rate)
            write_json(path, {"model": model, "task": name, **result})
            tests = "  ".join(f"{test} {values['accuracy']:.1%}" for test, values in result["tests"].items())
            sys.stdout.write(f"{name:14} {model:24} width {dim} rate {rate:g}  {tests}  {result['seconds']:.0f} s\n")
            sys.stdout.flush()


def _in_processes(size: str, models: list[str], tasks: list[str], out: Path, *, jobs: int) -> None:
    """Share the models among processes; raise `UserError` if one failed. They are ended with this one."""
    gpus, children = visible_gpus(), []
    for i in range(jobs):
        environment = os.environ | {_CHILD: "1"}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[i % len(gpus)]
            share = 0.9 / -(-jobs // len(gpus))
            environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.2f}")
        command = [sys.executable, "-m", "seqjax.harness.recall", f"--size={size}", f"--out={out}"]
        command += [f"--models={';'.join(models[i::jobs])}", f"--tasks={','.join(tasks)}"]
        children.append(subprocess.Popen(command, env=environment))
    try:
        while any(child.poll() is None for child in children):
            time.sleep(0.5)
    finally:
        for child in children:
            child.terminate()
            child.wait()
    failed = sum(child.returncode != 0 for child in children)
    if failed:
        raise UserError(
            f"{failed} of {jobs} processes failed, see above; the same command goes on with what is missing."
        )


if __name__ == "__main__":
    run_command(main)
