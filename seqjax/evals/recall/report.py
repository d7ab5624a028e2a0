"""The report of recall runs: tables per task, and accuracy by state size."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from seqjax.escape import markdown as escaped
from seqjax.evals.recall.setups import MODELS, is_file
from seqjax.evals.recall.tasks import TaskSetup
from seqjax.files import replacing
from seqjax.pictures import COLORS, shortened
from seqjax.reading import Float, check, read_json_lines
from seqjax.study.report import figures
from seqjax.study.report.tables import markdown

Results = Mapping[str, Sequence[Mapping[str, Any]]]  # per task: label -> result at the best rate, per width


CONTROLS = ("Transformer", "Transformer++", "Transformer++, QK norm")
LEARNT = 0.5  # accuracy in the training-like test at which a control has learned the task
PASSED = 0.8  # accuracy in the easiest training test at which a model counts as trained
RESULTS = "runs.jsonl"  # one result per line
# RESULT: fields that the command reads. SHOWN: further fields that the report shows.
RESULT = dict.fromkeys(("model", "task", "asked"), str) | dict.fromkeys(("dim", "seed"), int)
TEST = {"accuracy": float, "whole": float, "bits?": Float}  # older results have no bits
RESULT |= dict.fromkeys(("rate", "seconds"), float) | {"tests": {str: TEST}}
SHOWN = dict.fromkeys(("steps", "batch_size"), int) | {"chance": float, "device": str}
FIX = "delete this line, and its run is made again"


def results(directory: Path) -> list[dict[str, Any]]:
    """Return the results of all runs in a directory.

    Raises `UserError` for an incomplete line.
    """
    path = directory / RESULTS
    return read_json_lines(path, RESULT, fix=FIX) if path.exists() else []


def by_model(runs: Sequence[Mapping[str, Any]], task: TaskSetup) -> dict[str, list[Mapping[str, Any]]]:
    """Return a task's results by model, one per width at the `validated_rate`."""
    chosen: dict[str, list[Mapping[str, Any]]] = {}
    for label in dict.fromkeys([*MODELS, *(result["model"] for result in runs if is_file(result["model"]))]):
        of_model = [result for result in runs if (result["task"], result["model"]) == (task.name, label)]
        dims = sorted({result["dim"] for result in of_model})
        if dims:
            by = "score" if task.kind.score else "accuracy"
            chosen[label] = [best_rate([r for r in of_model if r["dim"] == dim], task.own, by) for dim in dims]
    return chosen


def best_rate(of_width: Sequence[Mapping[str, Any]], own: str, by: str = "accuracy") -> Mapping[str, Any]:
    """Return the result at the `validated_rate`, with mean and range over runs.

    `by` is "accuracy" or "score".
    """
    best = validated_rate(of_width, own, by)
    return {**_together([r for r in of_width if r["rate"] == best]), "tried": len({r["rate"] for r in of_width})}


def validated_rate(of_width: Sequence[Mapping[str, Any]], own: str, by: str) -> float:
    """Return the best learning rate on validation sequences, unused in tests.

    Older results have no validation sequences and use the test `own`. Among tied rates, the rate with fewer bits wins.
    """

    def chosen_by(runs: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        tests = [run["validation"] if "validation" in run else run["tests"][own] for run in runs]
        return _number(tests, lambda test: test[by]), _number(tests, lambda test: -test.get("bits", 0.0))

    return max(compared := _compared(of_width), key=lambda rate: chosen_by(compared[rate]))


def _compared(of_width: Sequence[Mapping[str, Any]]) -> dict[float, list[Mapping[str, Any]]]:
    """Return the results by ascending rate, for the seeds that all rates share.

    If no seed is shared, all seeds are returned.
    """
    rates = sorted({result["rate"] for result in of_width})
    by_rate = {rate: [result for result in of_width if result["rate"] == rate] for rate in rates}
    shared = set.intersection(*({result["seed"] for result in results} for results in by_rate.values()))
    return {rate: [r for r in results if not shared or r["seed"] in shared] for rate, results in by_rate.items()}


def _number(results: Sequence[Mapping[str, Any]], number: Callable[[Mapping[str, Any]], float]) -> float:
    """Return the mean of a number over results; -inf if a loss was NaN."""
    mean = statistics.mean(map(number, results))
    return -math.inf if math.isnan(mean) else mean


def _together(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first of several runs, with tests averaged over all runs.

    The runs differ at most in seed.
    """
    tests = {}
    for name in runs[0]["tests"]:
        of_runs = [run["tests"][name] for run in runs]
        mean = {key: statistics.mean(test[key] for test in of_runs) for key in set.intersection(*map(set, of_runs))}
        ranges = {key: [test[key] for test in of_runs] for key in ("accuracy", "score") if key in mean}
        tests[name] = mean | {f"{key}_range": (min(values), max(values)) for key, values in ranges.items()}
    seconds = [run["seconds"] for run in runs]
    return {**runs[0], "tests": tests, "runs": len(runs), "seconds": (min(seconds), max(seconds))}


def write(directory: Path, tasks: Sequence[TaskSetup], *, title: str) -> Path | None:
    """Write report.md and accuracy.png from the runs in `directory`.

    Returns the path of report.md, or None without runs.
    """
    runs = results(directory)
    for task in tasks:
        test = {"score": Float} if task.kind.score else {}
        form = SHOWN | {"state": dict.fromkeys(task.tests, int), "tests": dict.fromkeys(task.tests, test)}
        for line, result in enumerate(runs, start=1):
            if result["task"] == task.name:
                check(result, form, f"{directory / RESULTS}: line {line}", fix=FIX)
    by_task = {task.name: of_task for task in tasks if (of_task := by_model(runs, task))}
    if not by_task:
        return None
    shown = [task for task in tasks if task.name in by_task]
    parts = [f"# {title}", "![Accuracy by state size](accuracy.png)", ABOUT]
    parts += [f"## {task.name}: {task.kind.question}\n\n{_table(task, by_task[task.name])}" for task in shown]
    path = directory / "report.md"
    with replacing(path) as file:
        file.write("\n\n".join(parts).encode())
    draw(directory / "accuracy.png", shown, by_task, title=title)
    return path


BITS = "Bits: mean negative log2 likelihood of the right answers in the test in italics."
ABOUT = (
    "Accuracy in percent, on sequences that are not in the training data. In parentheses, for sequences with several "
    "answers: the percentage of sequences without a wrong answer. The test in italics has the training distribution. "
    "The learning rate is the best of the tried rates on validation sequences from the same distribution, which are in "
    "no test; results without validation use the test in italics. Several runs of a model are shown as their mean, "
    "with [minimum, maximum] if these differ by at least one percentage point. The last column is the mean over all "
    "tests. The state is the number of elements that decoding stores at the end of the test in italics, over all "
    "layers and including convolution states; for attention it grows with the sequence."
)


def _table(task: TaskSetup, results: Results) -> str:
    tests = [f"*{name}*" if name == task.own else name for name in task.tests]
    # Numbers for the training-like test: the task's score, and bits, missing in older results.
    every = [result["tests"][task.own] for of_model in results.values() for result in of_model]
    metrics = {"score": task.kind.score, "bits": "bits"}
    metrics = {key: name for key, name in metrics.items() if any(key in test for test in every)}
    header = ["model", "width", "state", "rate", *tests, *metrics.values(), "mean"]
    rows = []
    for label, of_model in results.items():
        for result in of_model:
            cells = [_cell(result["tests"][name]) for name in task.tests]
            state = f"{result['state'][task.own]:,}"
            mean = statistics.mean(test["accuracy"] for test in result["tests"].values())
            rate = f"{result['rate']:g} (of {result['tried']})" + (f", {n} runs" if (n := result["runs"]) > 1 else "")
            shown = label if passed(task, result) else f"{label} (not trained)"
            numbers = [f"{test[key]:.3g}" if key in (test := result["tests"][task.own]) else "" for key in metrics]
            rows.append([shown, str(result["dim"]), state, rate, *cells, *numbers, f"{100 * mean:.1f}"])
    chance = next(iter(results.values()))[0]["chance"]
    parts = [markdown(header, rows), f"Guessing: {100 * chance:.2g}%. {_training(results)}", task.published]
    if "bits" in metrics:
        parts.append(BITS)
    if "score" in metrics:
        parts.append(f"The learning rate is chosen by the score, {task.kind.score}, instead of the accuracy.")
    return "\n".join(filter(None, [*parts, _control(task, results), _untrained(task, results)]))


def passed(task: TaskSetup, result: Mapping[str, Any]) -> bool:
    """Return whether a result passed the easiest training test, if the task has one."""
    return not task.easy or result["tests"][task.easy]["accuracy"] >= PASSED


def _untrained(task: TaskSetup, results: Results) -> str:
    """Return a sentence if a model failed the easiest training test, else ""."""
    if all(passed(task, result) for of_model in results.values() for result in of_model):
        return ""
    return (
        f"**Not trained:** below {100 * PASSED:.0f}% accuracy in the test {task.easy}, the easiest test within the "
        "training distribution. The model did not learn the task at these learning rates and steps, so its failures in "
        "other tests do not show what it cannot do."
    )


def _control(task: TaskSetup, results: Results) -> str:
    """Return a sentence if full attention, the control, did not learn the task.

    Returns "" if it did, or if the task or the results have no control.
    """
    of_control = [(label, result) for label in CONTROLS for result in results.get(label, ())]
    if not task.kind.is_recall or not of_control:
        return ""
    best, label = max((result["tests"][task.own]["accuracy"], label) for label, result in of_control)
    if best >= LEARNT:
        return ""
    return (
        f"**The control failed:** full attention can look up every answer, but the best such model, {label}, has only "
        f"{100 * best:.1f}% accuracy in the test in italics. It did not learn the task at these widths, learning rates "
        "and steps, so the failures of other models are inconclusive."
    )


def _training(results: Results) -> str:
    """Return a sentence about training time and devices."""
    every = [result for of_model in results.values() for result in of_model]
    steps, sizes = (" or ".join(f"{n:,}" for n in sorted({r[key] for r in every})) for key in ("steps", "batch_size"))
    seconds = sorted(second for result in every for second in result["seconds"])
    devices = escaped(", ".join(sorted({result["device"] for result in every} - {""})))
    on = f" on {devices}" if devices else ""
    took = f"{seconds[0]:.0f} to {seconds[-1]:.0f} s"
    return f"Trained for {steps} steps of {sizes} sequences{on}; a run with its tests took {took}."


def _cell(test: Mapping[str, Any]) -> str:
    answers, sequences, lowest, highest = (100 * x for x in (test["accuracy"], test["whole"], *test["accuracy_range"]))
    if highest - lowest >= 1:
        return f"{answers:.1f} [{lowest:.1f}, {highest:.1f}]"
    by_answer, by_sequence = f"{answers:.1f}", f"{sequences:.1f}"
    return by_answer if by_answer == by_sequence else f"{by_answer} ({by_sequence})"


PANELS = 6  # in a row
LOOKS: tuple[dict[str, Any], ...] = (  # the training-like test, the hardest test
    {"color": COLORS[0], "marker": "o"},
    {"color": COLORS[3], "marker": "D", "markerfacecolor": "none"},
)
SIZES = (4.5, 2.5)  # marker sizes: largest width, smaller widths
ROW = 0.14  # inches


def draw(path: Path, tasks: Sequence[TaskSetup], results: Mapping[str, Results], *, title: str) -> None:
    """Draw a panel per task, with a row per model.

    A row has the training-like test and the hardest test. Rows are sorted by state size, the smallest at the top. Each
    row of panels has the models that ran any of its tasks, and shows the state sizes at the right.
    """
    states = _states(tasks, results)
    n_rows = -(-len(tasks) // PANELS)
    columns = -(-len(tasks) // n_rows)
    parts = [tasks[i * columns : (i + 1) * columns] for i in range(n_rows)]
    orders = [[name for name in states if any(name in results[task.name] for task in part)] for part in parts]
    heights = [ROW * len(order) + 1.0 for order in orders]
    names_width = 0.063 * max(len(shortened(name)) for name in states)
    width = max(1.18 * columns, 4.5) + names_width + 0.7
    figure = Figure(layout="constrained")
    grid = figure.subplots(n_rows, columns, squeeze=False, sharey="row", height_ratios=heights)
    for panels, part, order in zip(grid, parts, orders, strict=True):
        for panel, task in zip(panels, part, strict=False):
            _draw_task(panel, task, results[task.name], order)
        for panel in panels[len(part) :]:
            panel.set_axis_off()
        panels[0].set_yticks(range(len(order)), [*map(shortened, order)])
        panels[0].set_ylim(len(order) - 0.4, -0.6)
        style: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        style |= {"ha": "right", "fontsize": 7.5, "color": "0.35", "annotation_clip": False}
        for y, text in enumerate(["state", *(_short(states[name]) for name in order)], start=-1):
            panels[-1].annotate(text, (1, y), xytext=(38, 0), **style)
    first = grid[0][0]
    handles = [
        first.plot([], [], linestyle="none", markersize=SIZES[0], label=label, **look)[0]
        for label, look in zip(("the test like the training", "the hardest test"), LOOKS, strict=True)
    ]
    if any(len(of_model) > 1 for of_task in results.values() for of_model in of_task.values()):  # several widths
        look = LOOKS[0] | {"color": "0.4"}
        handles += first.plot([], [], linestyle="none", markersize=SIZES[1], label="smaller: a smaller width", **look)
    every = [result for of_task in results.values() for of_model in of_task.values() for result in of_model]
    if any(result["runs"] > 1 for result in every):
        handles += first.plot([], [], color="0.4", linewidth=1.2, label="range of several runs")
    handles += first.plot([], [], linestyle=":", color="0.4", linewidth=1, label="guessing")
    legend_columns = min(5, columns + 2)
    figure.legend(handles=handles, frameon=False, fontsize=8.5, loc="outside lower center", ncols=legend_columns)
    about = "Models in the order of their state (elements per sequence), the smallest at the top; no mark: not run"
    heading = f"{title}\n{figures.wrapped(about, round(11 * width))}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    lines = heading.count("\n") + 1 + -(-len(handles) // legend_columns)
    figure.set_size_inches(width, sum(heights) + 0.3 + 0.2 * lines)
    figures.save(figure, path)


def _states(tasks: Sequence[TaskSetup], results: Mapping[str, Results]) -> dict[str, int]:
    """Return the models' state sizes, ascending.

    Each is the geometric mean over the training-like tests, at the largest width.
    """
    logs: dict[str, list[float]] = {}
    for task in tasks:
        for label, of_model in results[task.name].items():
            logs.setdefault(label, []).append(math.log(max(of_model[-1]["state"][task.own], 1)))
    means = {label: statistics.mean(of_label) for label, of_label in logs.items()}
    return {label: round(math.exp(means[label])) for label in sorted(means, key=means.__getitem__)}


def _draw_task(panel: Axes, task: TaskSetup, results: Results, order: Sequence[str]) -> None:
    hardest = list(task.tests)[-1]
    tests = (task.own,) if hardest == task.own else (task.own, hardest)
    by, unit = ("score", 1) if task.kind.score else ("accuracy", 100)
    for y, label in enumerate(order):
        of_model = results.get(label, ())
        for k, result in enumerate(of_model):
            at = y + 0.26 * (len(of_model) - 1 - k)
            values = [unit * result["tests"][test][by] for test in tests]
            panel.plot(values, [at] * len(tests), color="0.8", linewidth=1, zorder=1)
            for test, value, look in zip(tests, values, LOOKS, strict=False):
                ends = [unit * end for end in result["tests"][test][f"{by}_range"]]
                panel.plot(ends, [at, at], color=look["color"], linewidth=1.2)
                panel.plot(value, at, markersize=SIZES[k < len(of_model) - 1], markeredgewidth=1, **look)
    if by == "accuracy":
        panel.axvline(100 * next(iter(results.values()))[0]["chance"], color="0.4", linewidth=1, linestyle=":")
        panel.set_xlim(-8, 108)
        panel.set_xticks(range(0, 101, 50))
    else:
        panel.xaxis.set_major_locator(MaxNLocator(3, min_n_ticks=2))
    panel.tick_params(axis="x", labelsize=7.5)
    panel.tick_params(axis="y", length=0, labelsize=8)
    panel.grid(color="0.93")
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_title(f"{task.name}\n{figures.wrapped(' / '.join(tests), 20)}", fontsize=8, loc="left")
    panel.set_xlabel(figures.wrapped(task.kind.score or "right answers (%)", 16), fontsize=8)


def _short(n: int) -> str:
    """Return a number of elements with three digits."""
    return f"{n / 1e6:.3g}M" if n >= 1e6 else f"{n / 1e3:.3g}k" if n >= 1000 else str(n)
