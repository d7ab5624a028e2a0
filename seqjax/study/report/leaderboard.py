"""Write leaderboard.csv, with all numbers per reference and model, and a LaTeX table.

Losses are in the study's unit; positive gaps are worse. An empty number means unknown; an empty `edge`, `next_rate` or
`needs` means none. `seqjax.study.gaps.Row` describes the columns with the names of its fields. `tokens_in` and
`tokens_out` are the differences of the in-domain and the OOD loss at equal tokens. `se_*` are the gap's standard
error components, which add in squares. `*_half` is half the width of a 95% interval. `speedup` is empty if only a bound
is known: `speedup_lo` is a lower and `speedup_hi` an upper bound. The last columns are the gaps per OOD domain.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seqjax import escape
from seqjax.errors import UserError
from seqjax.reading import read_table
from seqjax.study import gaps
from seqjax.study.gaps import Row
from seqjax.study.gaps.classes import ClassSums
from seqjax.study.gaps.rows import PARTS
from seqjax.study.gaps.statistics import Estimate
from seqjax.study.runs import files
from seqjax.study.runs.record import Records

FILE = "leaderboard.csv"
FIX = "restore it, or make it again with `seqjax study --analyse=DIR`"
COLUMNS: dict[str, type] = dict.fromkeys(("study", "reference", "model"), str)
COLUMNS |= {"parameters": int, "commit": str, "manifest": str, "seeds": int, "reference_seeds": int}
COLUMNS |= dict.fromkeys(("rates", "edge", "next_rate"), str)
COLUMNS |= {"loss": float, "tokens": int, "mid_rate": str, "octaves": float, "beyond": float}
COLUMNS |= dict.fromkeys(("gap", "lo", "hi", "df"), float)
COLUMNS |= {"verdict": str, "needs": str, "provisional": str, "as_tuned": float, "by_rate": str}
PART_COLUMNS = dict(zip(("se_seeds", "se_ref", "se_rate", "se_beyond", "se_docs"), PARTS, strict=True))
COLUMNS |= dict.fromkeys(PART_COLUMNS, float)
ESTIMATES = ("per_doubling", "tokens_in", "tokens_out")
COLUMNS |= {name + part: float for name in ESTIMATES for part in ("", "_half")}
COLUMNS |= dict.fromkeys(("copy", "speedup", "speedup_lo", "speedup_hi"), float)
COLUMNS |= {"card": str, "length": int}
Compared = Mapping[str, Sequence[Row]]  # reference -> the rows of all other models
LINE = dict[str, Any]


def compared(
    records: Records, sums: Mapping[str, ClassSums] | None = None, *, others: Sequence[Records] = ()
) -> dict[str, tuple[Row, ...]]:
    """Return the rows for each reference that has runs, best first.

    `sums` give the copy shares. `others` are studies on the same data. They supply the learning-rate slope, the seed
    variance and further seeds; their own models have no rows.
    """
    joined = files.united(records, others) if others else records
    by_reference = {}
    for name in (name for name in records.references if name in records.models):
        rows = [row for row in gaps.compare(joined, name) if row.model in records.models]
        by_reference[name] = gaps.with_copies(rows, records, sums or {})
    return by_reference


def shown(rows: Iterable[Row]) -> dict[str, Estimate]:
    """Return the gaps by model.

    If no model has a gap, return the OOD differences at equal tokens.
    """
    gap_values = {row.model: row.gap for row in rows if row.gap is not None}
    return gap_values or {row.model: row.at_equal_tokens.outside for row in rows if row.at_equal_tokens is not None}


def shown_name(rows: Sequence[Row], reference: str) -> str:
    """Return the name of the values from `shown`."""
    has_gap = not rows or any(row.gap is not None for row in rows)
    return f"gap to {reference}" if has_gap else f"OOD difference to {reference} at equal tokens"


# ------------------------------------------------------------------------------------------------------------- as CSV
def rows(records: Records, comparison: Compared | None = None) -> list[LINE]:
    """Return the lines for leaderboard.csv, column -> value; None means unknown.

    `comparison` is `compared(records)` by default.
    """
    comparison = compared(records) if comparison is None else comparison
    return [_line(records, row) for reference_rows in comparison.values() for row in reference_rows]


def _line(records: Records, row: Row) -> LINE:
    tokens, speed = row.at_equal_tokens, row.speed_up
    estimates = {
        "per_doubling": row.per_doubling,
        "tokens_in": tokens and tokens.inside,
        "tokens_out": tokens and tokens.outside,
    }
    low, high = (row.gap and row.gap.interval) or (None, None)
    sides = {"": row.edge, "reference ": row.reference_edge}
    next_rates = {"": row.next_rates.get("model"), "reference ": row.next_rates.get("reference")}
    card, length = records.conditions.get(speed.condition, (speed.condition, None)) if speed else ("", None)
    line: LINE = {
        "study": records.name,
        "reference": row.reference,
        "model": row.model,
        "parameters": row.parameters,
        "commit": _metadata(records, row, "commit"),
        "manifest": _metadata(records, row, "manifest"),
        "seeds": row.seeds,
        "reference_seeds": row.reference_seeds,
        "rates": ";".join(map(records.rate_text, row.rates)),
        "edge": ";".join(side + edge for side, edge in sides.items() if edge),
        "next_rate": ";".join(side + records.rate_text(rate) for side, rate in next_rates.items() if rate),
        "loss": row.loss,
        "tokens": row.tokens,
        "mid_rate": "" if row.mid_rate is None else records.rate_text(row.mid_rate),
        "octaves": None if row.gap is None else row.octaves,
        "beyond": None if row.gap is None else row.beyond,
        "gap": row.gap and row.gap.value,
        "lo": low,
        "hi": high,
        "df": row.gap.freedom if row.gap is not None and row.gap.error is not None else None,
        "verdict": row.verdict.word,
        "needs": row.verdict.needs,
        "provisional": "yes" if row.provisional else "no",
        "as_tuned": row.as_tuned,
        "by_rate": ";".join(f"{records.rate_text(rate)}:{gap:.4f}" for rate, gap in row.by_rate.items()),
    }
    line |= {column: math.sqrt(row.parts[part]) if part in row.parts else None for column, part in PART_COLUMNS.items()}
    for name, estimate in estimates.items():
        line |= {name: estimate and estimate.value, f"{name}_half": estimate and estimate.half}
    bounds = (
        {"": (speed.low, speed.high), "at least": (speed.value, None), "at most": (None, speed.value)} if speed else {}
    )
    line |= {"copy": row.copy, "speedup": speed.value if speed and not speed.bound else None}
    line |= dict(zip(("speedup_lo", "speedup_hi"), bounds[speed.bound] if speed else (None, None), strict=True))
    line |= {"card": card, "length": length}
    return line | {name: row.gaps[name].value if name in row.gaps else None for name in records.domains}


def _metadata(records: Records, row: Row, field: str) -> str:
    values = (run.metadata.get(field) for run in records.of_model(row.model))
    return ";".join(dict.fromkeys(value for value in values if value))


def csv_text(lines: Sequence[LINE]) -> str:
    """Return lines, from one or several studies, as CSV."""
    columns = dict.fromkeys((*COLUMNS, *(name for line in lines for name in line)))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for line in lines:
        writer.writerow([_cell(line.get(name)) for name in columns])
    return file.getvalue()


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def read(path: str | Path) -> list[LINE]:
    """Return the lines in a file from `csv_text`.

    Raises `UserError` if a value does not have its column's type.
    """
    read_table(path, dict.fromkeys(COLUMNS, str), fix=FIX)  # reports errors before the header is read
    with Path(path).open(encoding="utf-8", newline="") as file:
        domains = [name for name in next(csv.reader(file)) if name not in COLUMNS]
    types = COLUMNS | dict.fromkeys(domains, float)
    lines = []
    for i, text in enumerate(read_table(path, dict.fromkeys(types, str), fix=FIX), start=1):
        try:
            lines.append({name: _value(text[name], kind) for name, kind in types.items()})
        except ValueError as error:
            raise UserError(f"{path}, row {i}: {error}; {FIX}.") from error
    return lines


def _value(text: str, kind: type) -> Any:
    return text if kind is str else kind(text) if text else None


# ----------------------------------------------------------------------------------------------------------- in LaTeX
TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
TEX |= {sign: "\\" + sign for sign in "&%$#_{}"}


def escaped(text: str) -> str:
    """Return text with TeX's special characters escaped."""
    return re.sub(f"[{re.escape(''.join(TEX))}]", lambda match: TEX[match.group()], text)


def latex(records: Records, comparison: Compared) -> str:
    r"""Return the leaderboard as a LaTeX table; it needs \usepackage{booktabs}."""
    lines = [
        escape.line(f"% {records.name or 'leaderboard'}: {records.title}"),
        r"\begin{tabular}{lrrlrl}",
        r"\toprule",
        rf"model & parameters (M) & seeds & learning rates & gap ({escaped(records.unit.name)}) & verdict \\",
    ]
    for reference, reference_rows in comparison.items():
        lines += [r"\midrule", rf"\multicolumn{{6}}{{l}}{{Reference: {escaped(reference)}}} \\", r"\midrule"]
        for row in reference_rows:
            gap = "--" if row.gap is None else "$" + row.gap.text().replace("±", r"\pm") + "$"
            size = "--" if row.parameters is None else f"{row.parameters / 1e6:.1f}"
            rates = ", ".join(map(records.rate_text, row.rates))
            cells = [escaped(row.model), size, str(row.seeds), escaped(rates), gap, escaped(row.text)]
            lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
