"""Format results as Markdown.

The page has all metrics, then the paper's tables with this model added.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from seqjax.escape import markdown as escaped
from seqjax.evals.lm_eval.results import KEY
from seqjax.evals.lm_eval.tasks import PAPER
from seqjax.files import replacing

SOURCE = "arXiv 2505.18522, table {table}, models of 1.3B parameters"
# Percent by model; columns in the order of `tasks.PAPER`.
PUBLISHED: dict[int, dict[str, tuple[float, ...]]] = {
    1: {
        "Transformer++": (75.07, 45.54, 30.22),
        "Mamba-1": (36.09, 31.03, 6.44),
        "Mamba-2": (37.98, 35.25, 17.60),
        "W=256": (12.96, 41.72, 1.63),
        "Top-1 Element": (68.23, 43.77, 26.95),
        "Top-1 Chunk, exact": (69.22, 44.40, 22.32),
        "Top-1 Chunk, approx": (61.66, 45.38, 27.13),
    },
    2: {
        "Transformer++": (
            *(25.21, 33.60, 48.48, 25.94, 60.43, 33.88, 39.56, 77.60, 48.42, 74.00, 68.99, 53.91, 65.57),
        ),
        "Mamba-1": (*(24.30, 34.60, 52.82, 27.22, 54.65, 32.73, 39.10, 75.90, 50.53, 74.00, 70.67, 53.91, 57.51),),
        "Mamba-2": (*(24.74, 32.80, 50.04, 28.92, 56.27, 33.68, 40.28, 75.70, 51.45, 78.00, 71.44, 55.09, 60.44),),
        "W=256": (*(25.54, 34.00, 48.82, 26.96, 59.14, 33.88, 40.02, 73.70, 48.19, 72.00, 70.89, 52.49, 63.00),),
        "Top-1 Element": (
            *(25.94, 32.60, 47.85, 26.45, 60.15, 31.29, 40.94, 73.40, 45.05, 72.00, 69.15, 53.75, 62.27),
        ),
        "Top-1 Chunk, exact": (
            *(25.96, 32.80, 50.55, 27.22, 60.43, 31.77, 40.07, 77.40, 48.75, 75.00, 69.64, 53.51, 66.30),
        ),
        "Top-1 Chunk, approx": (
            *(25.24, 33.00, 49.33, 26.02, 58.87, 33.30, 39.82, 75.30, 48.59, 70.00, 69.70, 55.01, 64.47),
        ),
    },
}


class Value(NamedTuple):
    """One metric of one task; `n` is the number of documents."""

    task: str
    metric: str
    value: float
    stderr: float | None
    n: int
    fewshot: int | None


def values(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Value]:
    """Yield the metrics in `results`.

    A group yields its own metrics if it has any, otherwise its tasks' metrics.
    """
    for task, result in results.items():
        groups = result.get("groups") or {}
        rows = {task: groups[task]} if task in groups else result["results"]
        for name, row in rows.items():
            for key, value in row.items():
                metric, _, kind = key.partition(",")
                if not kind or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                    continue
                error = row.get(f"{metric}_stderr,{kind}")
                error = _float(error) if isinstance(error, (int, float)) else None
                yield Value(name, metric, _float(value), error, _n(result, name), _fewshot(result, name))


def _float(value: float) -> float:
    """Convert a number to float; integers beyond the float range become infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def markdown(results: Mapping[str, Mapping[str, Any]], *, name: str) -> str:
    """Return a page with all results for the model called `name`."""
    first = next(iter(results.values()))
    identity = first[KEY]
    lines = [
        f"# {escaped(name)}",
        "",
        f"Step {identity.get('step', '')}, {(first.get('config') or {}).get('model_num_parameters', 0):,} parameters, "
        f"max_length {identity.get('max_length', 0):,} tokens, tokenizer {escaped(identity.get('tokenizer', ''))}; "
        f"parameter hash {escaped(identity.get('parameters_sha256', '')[:12])}. lm_eval "
        f"{escaped(first.get('lm_eval_version', ''))}.",
        "",
    ]
    limited = sorted(task for task, result in results.items() if result[KEY].get("limit"))
    if limited:
        task_names = escaped(", ".join(limited))
        lines += [f"**{task_names}: only some documents (--limit). These numbers are not comparable.**", ""]
    lines += ["| task | metric | value | standard error | documents | few-shot examples |", "|---|---|---|---|---|---|"]
    for v in values(results):
        error = "" if v.stderr is None else number(v.stderr)
        task, metric = escaped(v.task), escaped(v.metric)
        lines.append(f"| {task} | {metric} | {number(v.value)} | {error} | {v.n:,} | {_or_empty(v.fewshot)} |")
    for table in (2, 1):
        lines += _paper_comparison(results, table, name)
    return "\n".join(lines) + "\n"


def number(x: float) -> str:
    """Format a metric; large perplexities of untrained models use scientific notation."""
    return f"{x:.4f}" if abs(x) < 1e5 else f"{x:.3e}"


def write(out: Path, results: Mapping[str, Mapping[str, Any]], *, name: str) -> Path:
    """Write `table.md` into the results directory and return its path."""
    path = out / "table.md"
    with replacing(path) as file:
        file.write(markdown(results, name=name).encode())
    return path


def _paper_comparison(results: Mapping[str, Mapping[str, Any]], table: int, name: str) -> list[str]:
    columns = [task for task in PAPER if task.table == table]
    scores: dict[str, float] = {}
    for task in columns:
        result = results.get(task.name)
        for v in values({task.name: result} if result else {}):
            if v.task == task.name and v.metric == task.metric and _as_in_paper(result, v.fewshot, task.fewshot):
                scores[task.column] = 100 * v.value
    if not scores:
        return []
    lines = [
        "",
        f"## Comparison with table {table} in the paper",
        "",
        f"Percent. Source of the other rows: {SOURCE.format(table=table)}; the paper does not state its lm_eval "
        "version.",
        "",
        f"| model | {' | '.join(task.column for task in columns)} | average |",
        f"|---|{'---|' * (len(columns) + 1)}",
    ]
    cells = [f"{scores[task.column]:.2f}" if task.column in scores else "" for task in columns]
    average = f"{sum(scores.values()) / len(scores):.2f}" if len(scores) == len(columns) else ""
    lines.append(f"| **{escaped(name)}** | {' | '.join(cells)} | {average} |")
    for model, numbers in PUBLISHED[table].items():
        average = f"{sum(numbers) / len(numbers):.2f}"
        lines.append(f"| {model} | {' | '.join(f'{x:.2f}' for x in numbers)} | {average} |")
    return lines


def _as_in_paper(result: Mapping[str, Any] | None, fewshot: int | None, paper_fewshot: int) -> bool:
    return result is not None and not result[KEY].get("limit") and fewshot == paper_fewshot


def _n(result: Mapping[str, Any], name: str) -> int:
    names = _leaves(result, name)
    counts = result.get("n-samples", {})
    return sum(counts[n]["effective"] for n in names if n in counts)


def _fewshot(result: Mapping[str, Any], name: str) -> int | None:
    """Return the number of few-shot examples.

    It is None for a group with different numbers.
    """
    shots = {result.get("n-shot", {}).get(n) for n in _leaves(result, name)}
    return shots.pop() if len(shots) == 1 else None


def _leaves(result: Mapping[str, Any], name: str) -> list[str]:
    """Return a group's tasks without duplicates, or [`name`] for a task."""
    subtasks, names = result.get("group_subtasks") or {}, {name: None}
    queue = [name]
    for node in queue:  # grows in the loop; `names` stops cycles
        new = [child for child in subtasks.get(node) or () if child not in names]
        names |= dict.fromkeys(new)
        queue += new
    return [node for node in names if not subtasks.get(node)]


def _or_empty(value: int | None) -> str:
    return "" if value is None else str(value)
