"""Write docs/results/runs.csv, a row for each run whose results are in this folder: `python docs/results/runs.py`.

The minutes are those of training and evaluation, without compiling, on one device but for demo_order, and for full
attention of books_100k (two). A run that two studies show is listed with the first.
"""

import csv
import io
import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent
# By date of the first run, with the command that made them.
STUDIES = {
    "first_110m": "-",  # its study went with the results that replaced it
    "limited_110m": "seqjax study --study=limited_110m --out=DIR",
    "figure4": "seqjax study --study=figure4:small --out=DIR",
    "trunks_110m": "seqjax study --study=trunks_110m --out=DIR",
    "hybrids": "seqjax study --study=hybrids --out=DIR",
    "switches": "seqjax study --study=switches --out=DIR",
    "books_16k": "seqjax study --study=books_16k --out=DIR",
    "books_100k": "seqjax study --study=books_100k --out=DIR",
    "demo_order": "seqjax judge --config=NAME:demo --out=DIR",
    "ema_110m": "seqjax judge --config=ema.py:110m --out=DIR",
}


def rows() -> list[dict[str, object]]:
    """Return the rows of the file."""
    found, seen = [], set()
    for name, command in STUDIES.items():
        stored = json.loads((HERE / name / "runs.json").read_text(encoding="utf-8"))
        with (HERE / name / "points.csv").open(encoding="utf-8", newline="") as file:
            points = list(csv.DictReader(file))
        for label, run in stored["runs"].items():
            if (identity := (run["model"], run["seconds"])) in seen:
                continue
            seen.add(identity)
            of_run = [point for point in points if point["run"] == label]
            tokens = max(int(point["tokens"]) for point in of_run)
            loss = {point["domain"]: float(point["loss"]) for point in of_run if int(point["tokens"]) == tokens}
            config = run.get("config", {})
            found.append(
                {
                    "study": name,
                    "run": label,
                    "model": run["model"],
                    "seed": run["seed"],
                    "learning_rate": config.get("optim", {}).get("lr", ""),
                    "parameters": run["parameters"],
                    "tokens": tokens,
                    "loss_in_domain": f"{statistics.mean(loss[key] for key in stored['study']['against']):.4f}",
                    "loss_out_of_domain": f"{statistics.mean(loss[key] for key in stored['study']['domains']):.4f}",
                    "device": run["device"],
                    "minutes": f"{run['seconds'] / 60:.1f}",
                    "tokens_per_s": round(run["tokens_per_s"]),
                    "commit": run["commit"][:12],
                    "command": command,
                }
            )
    return found


def text() -> str:
    """Return what the file holds."""
    table = rows()
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


if __name__ == "__main__":
    (HERE / "runs.csv").write_text(text(), encoding="utf-8")
