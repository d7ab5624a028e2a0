"""What came of the runs: a table per task, and accuracy against the size of the state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from seqjax.files import read_json
from seqjax.harness.recall.setups import MODELS, TaskSetup
from seqjax.harness.recall.train import best
from seqjax.study import figures
from seqjax.study.tables import markdown

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # of a task: label -> one result for each width, the best rate's


def read(directory: Path, task: TaskSetup) -> dict[str, list[Mapping[str, Any]]]:
    """Return what is there of a task: of every model and width the rate that is best in the test like the training."""
    found = [read_json(path) for path in sorted((directory / "runs" / task.name).glob("*.json"))]
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for label in MODELS:
        of_model = [result for result in found if result["model"] == label]
        dims = sorted({result["dim"] for result in of_model})
        if dims:
            by_model[label] = [best((r for r in of_model if r["dim"] == dim), task.own) for dim in dims]
    return by_model


def write(directory: Path, tasks: Sequence[TaskSetup], *, title: str) -> Path | None:
    """Write report.md and accuracy.png from the runs in `directory`; return the former, or None if there are none."""
    results = {task.name: of_task for task in tasks if (of_task := read(directory, task))}
    if not results:
        return None
    shown = [task for task in tasks if task.name in results]
    parts = [f"# {title}", "![Accuracy against the size of the state](accuracy.png)", ABOUT]
    parts += [f"## {task.name}: {task.question}\n\n{_table(task, results[task.name])}" for task in shown]
    path = directory / "report.md"
    path.write_text("\n\n".join(parts), encoding="utf-8")
    draw(directory / "accuracy.png", shown, results, title=title)
    return path


ABOUT = (
    "Share of right answers in percent, over sequences that were not trained on; beside it, where a sequence has "
    "several answers, the share of sequences without a wrong one. The rate is the best of those tried in the test that "
    "is like the training, which is in italics. The state is how many numbers decoding keeps at the end of that test, "
    "over all layers; for attention they grow with the sequence."
)


def _table(task: TaskSetup, results: Results) -> str:
    header = ["model", "width", "state", "rate", *(f"*{name}*" if name == task.own else name for name in task.tests)]
    rows = []
    for label, of_model in results.items():
        for result in of_model:
            cells = [_cell(result["tests"][name]) for name in task.tests]
            state = f"{result['state'][task.own]:,}"
            rows.append([label, str(result["dim"]), state, f"{result['rate']:g}", *cells])
    chance = next(iter(results.values()))[0]["chance"]
    return markdown(header, rows) + f"\nGuessing: {100 * chance:.2g}%."


def _cell(test: Mapping[str, float]) -> str:
    accuracy, whole = (100 * test[key] for key in ("accuracy", "whole"))
    return f"{accuracy:.1f}" if accuracy == whole else f"{accuracy:.1f} ({whole:.1f})"


def draw(path: Path, tasks: Sequence[TaskSetup], results: Mapping[str, Results], *, title: str) -> None:
    """Draw a column per task: above the test that is like the training, below the hardest."""
    figure = Figure(figsize=(3.1 * len(tasks) + 2.4, 6.2), layout="constrained")
    panels = figure.subplots(2, len(tasks), squeeze=False, sharey=True)
    handles: dict[str, Any] = {}
    for column, task in enumerate(tasks):
        for row, test in enumerate((task.own, list(task.tests)[-1])):
            panel = panels[row][column]
            for label, of_model in results[task.name].items():
                x = [result["state"][test] for result in of_model]
                y = [100 * result["tests"][test]["accuracy"] for result in of_model]
                look: dict[str, Any] = figures.style(list(MODELS).index(label)) | {"markersize": 6, "linewidth": 1.0}
                (handles[label],) = panel.plot(x, y, label=label, **look)
            chance = 100 * next(iter(results[task.name].values()))[0]["chance"]
            panel.axhline(chance, color="0.6", linewidth=0.8, linestyle=":")
            panel.set_xscale("log")
            panel.set_ylim(-4, 104)
            panel.grid(alpha=0.25, linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_title(f"{task.name}, {test}" + (" (as trained)" if row == 0 else ""), fontsize=9, loc="left")
            if row == 1:
                panel.set_xlabel("numbers in the state")
            if column == 0:
                panel.set_ylabel("right answers, %")
    order = [handles[label] for label in MODELS if label in handles]
    figure.legend(handles=order, frameon=False, fontsize=9, loc="outside right center")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figures.save(figure, path)
