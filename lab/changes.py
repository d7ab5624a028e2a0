"""Write lab/log/leaderboard_changes.md: gaps before and after matched rates.

    python -m lab.changes [--study=lab/results/trunks_110m]

The earlier gaps are in the study's old_gaps.csv. Three changes separate them from the new gaps. All near-best rates and
seeds replace a single pair of rates with paired seeds; later runs are added; and the common slope corrects for the
learning rate.
"""

import argparse
import csv
import dataclasses
from pathlib import Path

from seqjax.study.gaps import Row, compare
from seqjax.study.report.tables import DASH, markdown
from seqjax.study.runs import files
from seqjax.study.runs.studies import ENDS

OUT = Path(__file__).parent / "log" / "leaderboard_changes.md"
HEADER = ["model", "earlier gap", "earlier verdict", "as tuned, the same runs", "as tuned", "gap", "verdict"]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, default=Path("lab/results/trunks_110m"))
    directory = parser.parse_args().study
    records = files.read(directory)
    later = [run for run in records.runs if tuple(run.metadata["config"]["train"]["ends"]) == ENDS]
    before = dataclasses.replace(records, runs=[run for run in records.runs if run not in later])
    with (directory / "old_gaps.csv").open(encoding="utf-8", newline="") as file:
        earlier = {(row["model"], row["reference"]): row for row in csv.DictReader(file)}
    text = [
        "# Gaps before and after matched learning rates\n",
        f"Study {directory.name}. OOD gaps in nats per token, with half of the 95% interval. *Earlier*: one pair of "
        "learning rates and paired seeds. *As tuned, the same runs*: all near-best rates and seeds, each side at its "
        f"own rates. *As tuned*: also with {len(later)} later runs. *Gap*: at matched learning rates.\n",
        "Reasons for the differences. Earlier to as tuned: all near-best rates instead of one pair, and a line through "
        "the heights instead of a cubic through the better side's ends. As tuned to gap: the learning rate (common "
        "slope times the difference of the mean rates). Intervals now cover the reference's seeds, unpaired, and do "
        "not widen with the number of tried rates.\n",
    ]
    for reference in records.references:
        first = {row.model: row for row in compare(before, reference)}
        rows = [
            _row(row, first.get(row.model), earlier.get((row.model, reference))) for row in compare(records, reference)
        ]
        text += [f"## Gaps to {reference}\n", markdown(HEADER, rows)]
    OUT.write_text("\n".join(text), encoding="utf-8")


def _row(row: Row, first: Row | None, earlier: dict[str, str] | None) -> list[str]:
    def tuned(one: Row | None) -> str:
        return DASH if one is None or one.as_tuned is None else f"{one.as_tuned:+.3f}"

    old = earlier or {"gap": "", "interval": "", "verdict": DASH}
    width = f" ± {float(old['interval']):.3f}" if old["interval"] else ""
    gap = f"{float(old['gap']):+.3f}{width}" if old["gap"] else DASH
    new = DASH if row.gap is None else row.gap.text()
    return [row.model, gap, old["verdict"], tuned(first), tuned(row), new, row.text]


if __name__ == "__main__":
    main()
