"""Report several runs on one page: `python -m lab.suite --out=DIR`.

lab/suite/suite.sh runs this command at the end. It reads the runs in DIR, one directory each, with their available
losses (metrics.jsonl), S-NIAH results (niah.json) and lm-evaluation-harness tasks (harness/*.json). It stores them in
DIR/runs.json and writes DIR/report.md with a link to the recall report in DIR/recall. Stored runs stay in the report
after their directories are deleted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqjax import store
from seqjax.command_line import command_parser, run_command
from seqjax.errors import UserError
from seqjax.escape import markdown as escaped
from seqjax.evals import niah
from seqjax.evals.lm_eval import results
from seqjax.evals.lm_eval.table import Value, values
from seqjax.files import replacing, write_json
from seqjax.reading import read_json
from seqjax.study.report.tables import DASH, markdown
from seqjax.terminal import tell
from seqjax.training import metrics


class Run(NamedTuple):
    """A run: run.json, config.json, evaluations, niah.json and harness/*.json."""

    name: str
    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    evaluations: Sequence[Mapping[str, Any]]
    niah: Mapping[str, Any]
    harness: Mapping[str, Mapping[str, Any]]

    @property
    def needle(self) -> Mapping[str, Mapping[str, float]]:
        """The results of S-NIAH by length."""
        return self.niah.get("lengths", {})

    @property
    def tasks(self) -> list[Value]:
        """The harness metrics of all tasks."""
        return list(values(self.harness))


FACTS = {"device": str, "devices": int, "parameters": int}
RUN = {
    "name": str,
    "facts": FACTS,
    "config": dict,
    "evaluations": [metrics.ROW],
    "niah": niah.FORM,
    "harness": {str: results.FORM},
}


def main(argv: list[str]) -> None:
    """Write the page."""
    parser = command_parser("suite", description=__doc__)
    parser.prog = "python -m lab.suite"
    parser.add_argument("--out", required=True, type=store.location, help="the directory of the runs")
    out = parser.parse_args(argv).out
    out = store.local(out, "--out")
    stored_path = out / "runs.json"
    fix = "delete it: the runs whose directories are there are read again"
    stored = read_json(stored_path, {"runs": [RUN]}, fix=fix)["runs"] if stored_path.is_file() else []
    known = [Run(*(run[field] for field in Run._fields)) for run in stored]
    by_name = {run.name: run for run in (*known, *(read(path.parent) for path in out.glob("*/metrics.jsonl")))}
    if not by_name:
        raise UserError(f"{out} has no directory with a run; give the --out of lab/suite/suite.sh.")
    runs = [by_name[name] for name in sorted(by_name)]
    write_json(stored_path, {"runs": [run._asdict() for run in runs]})
    path = out / "report.md"
    with replacing(path) as file:
        file.write(page(runs, recall=(out / "recall" / "report.md").is_file()).encode())
    tell(f"Wrote {path}")


def read(workdir: Path) -> Run:
    """Return the available results of a run."""
    needle = workdir / "niah.json"
    return Run(
        name=workdir.name,
        facts=read_json(workdir / "run.json", FACTS),
        config=read_json(workdir / "config.json"),
        evaluations=[row for row in metrics.read(workdir) if any(key.startswith("eval/") for key in row)],
        niah=read_json(needle, niah.FORM) if needle.is_file() else {},
        # Drop the long description of the machine; `facts` has the relevant versions.
        harness={
            task: {key: value for key, value in result.items() if key != "pretty_env_info"}
            for task, result in results.read(workdir / "harness").items()
        },
    )


def page(runs: Sequence[Run], *, recall: bool) -> str:
    """Return the page as Markdown; `recall` adds a link to the recall report."""
    devices = sorted({f"{run.facts['devices']} x {run.facts['device']}" for run in runs})
    manifests = sorted({str(run.facts.get("manifest", ""))[:16] for run in runs})
    parts = [
        "# Evaluation suite",
        f"Trained on {escaped(', '.join(devices))} for each run; data {escaped(', '.join(manifests))}.",
        f"## Loss\n\nNats per token, at the end of the training.\n\n{_losses(runs)}",
    ]
    if any(run.needle for run in runs):
        parts.append(f"## One number in a long text (S-NIAH)\n\nPercent found, by tokens.\n\n{_needles(runs)}")
    if any(run.tasks for run in runs):
        parts.append(f"## Tasks of lm-evaluation-harness\n\n{_tasks(runs)}")
    if recall:
        parts.append("## Recall and state\n\nSmall models of the same mixers: [report](recall/report.md).")
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _losses(runs: Sequence[Run]) -> str:
    fields = ["train/loss", *_union([key for row in run.evaluations for key in row if _is_loss(key)] for run in runs)]
    header = ["run", "parameters", "tokens", *(_heading(field) for field in fields)]
    rows = []
    for run in runs:
        last = run.evaluations[-1] if run.evaluations else {}
        numbers = [DASH if last.get(field) is None else f"{last[field]:.4f}" for field in fields]
        rows.append([escaped(run.name), f"{run.facts['parameters']:,}", f"{last.get('tokens', 0):,}", *numbers])
    return markdown(header, rows)


def _is_loss(key: str) -> bool:
    kind, _, rest = key.partition("/")
    return rest.endswith({"eval": "/loss", "eval_mean": "/equal"}.get(kind, "?"))


def _heading(field: str) -> str:
    if field == "train/loss":
        return "training"
    kind, _, name = field.rpartition("/")[0].partition("/")
    return escaped(f"mean {name.replace('_', ' ')}" if kind == "eval_mean" else name)


def _needles(runs: Sequence[Run]) -> str:
    lengths = sorted(_union(run.needle for run in runs), key=int)
    rows = [[escaped(run.name), *(_needle(run.needle.get(length)) for length in lengths)] for run in runs]
    return markdown(["run", *(f"{int(length):,}" for length in lengths)], rows)


def _needle(result: Mapping[str, float] | None) -> str:
    return f"{100 * result['accuracy']:.1f} of {result['samples']}" if result else DASH


def _tasks(runs: Sequence[Run]) -> str:
    of_run = [{(value.task, value.metric): value for value in run.tasks} for run in runs]
    rows = [
        [escaped(task), escaped(metric), *(_measured(of_metrics.get((task, metric))) for of_metrics in of_run)]
        for task, metric in _union(of_run)
    ]
    return markdown(["task", "metric", *(escaped(run.name) for run in runs)], rows, left=2)


def _measured(value: Value | None) -> str:
    if value is None:
        return DASH
    return f"{value.value:.4g}" + (f" ± {value.stderr:.2g}" if value.stderr else "")


def _union(several: Any) -> list[Any]:
    """Return the union of the collections, in order of first appearance."""
    return list(dict.fromkeys(x for collection in several for x in collection))


if __name__ == "__main__":
    run_command(main)
