"""Tables for terminal and Markdown, and JSON result files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqjax.files import write_json
from seqjax.reading import read_json


class Column(NamedTuple):
    """A table column: result key, heading, format with width, and a factor."""

    key: str
    heading: str
    form: str
    scale: float = 1.0

    @property
    def width(self) -> int:
        """Return the width in characters: 10 for ">10.3f"."""
        return int(self.form.lstrip(">").partition(".")[0].rstrip("%,def"))

    def cell(self, result: Mapping[str, Any]) -> str:
        """Return the value as text, or a dash if the result has none."""
        value = result.get(self.key)
        return f"{'-':>{self.width}}" if value is None else format(self.scale * value, self.form)


class Table(NamedTuple):
    """A table of labelled rows; `label_width` is the label width in characters."""

    label_width: int
    columns: Sequence[Column]

    def header(self) -> str:
        """Return the header line."""
        return " " * self.label_width + "".join(f"{c.heading:>{c.width}}" for c in self.columns)

    def row(self, label: str, result: Mapping[str, Any]) -> str:
        """Return a result as a line, or its error message."""
        if "error" in result:
            lines = result["error"].splitlines() or ["no message"]
            return f"{label:<{self.label_width}}  {lines[0][:100]}"
        return f"{label:<{self.label_width}}" + "".join(c.cell(result) for c in self.columns)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: labels left-aligned, numbers right-aligned."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report. Called after every measurement, so that an interrupted run keeps its results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report)


def load(path: str | Path) -> dict[str, Any]:
    """Return a report that `save` wrote."""
    return read_json(Path(path))


def differences(report: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Return differences in device and settings between two reports; they may explain differing numbers."""
    pairs = {"device": (report["machine"]["device"], recorded["machine"]["device"])}
    pairs |= {key: (value, recorded["settings"].get(key)) for key, value in report["settings"].items()}
    return [f"{key} {new}, recorded with {old}" for key, (new, old) in pairs.items() if new != old]
