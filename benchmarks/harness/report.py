"""Tables on the terminal and in Markdown, and the JSON files of results."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqjax.files import write_json
from seqjax.reading import read_json


class Column(NamedTuple):
    """A number of a table: the key of a result, its heading, a format with its width, and what to multiply it with."""

    key: str
    heading: str
    form: str
    scale: float = 1.0

    @property
    def width(self) -> int:
        """Characters, from the format: 10 for ">10.3f"."""
        return int(self.form.lstrip(">").partition(".")[0].rstrip("%,def"))

    def cell(self, result: Mapping[str, Any]) -> str:
        """The number as text, or a dash where the result lacks it."""
        value = result.get(self.key)
        return f"{'-':>{self.width}}" if value is None else format(self.scale * value, self.form)


class Table(NamedTuple):
    """Rows of a name and numbers; `label_width` is that of the name."""

    label_width: int
    columns: Sequence[Column]

    def header(self) -> str:
        """The line above the rows."""
        return " " * self.label_width + "".join(f"{c.heading:>{c.width}}" for c in self.columns)

    def row(self, label: str, result: Mapping[str, Any]) -> str:
        """A result as a line, or its error message."""
        if "error" in result:
            lines = result["error"].splitlines() or ["no message"]
            return f"{label:<{self.label_width}}  {lines[0][:100]}"
        return f"{label:<{self.label_width}}" + "".join(c.cell(result) for c in self.columns)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown: names to the left, numbers to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report; called after every measurement, so that an interrupted run keeps its results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report)


def load(path: str | Path) -> dict[str, Any]:
    """Return a report that `save` wrote."""
    return read_json(Path(path))


def differences(report: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """The differences of device and settings between two reports, which may explain their numbers."""
    pairs = {"device": (report["machine"]["device"], recorded["machine"]["device"])}
    pairs |= {key: (value, recorded["settings"].get(key)) for key, value in report["settings"].items()}
    return [f"{key} {new}, recorded with {old}" for key, (new, old) in pairs.items() if new != old]
