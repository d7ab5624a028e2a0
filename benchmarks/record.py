"""Write the training speeds that `seqjax train --dry_run` reads, seqjax/training/recorded_speeds.json:

    python -m benchmarks.record

The entries come from all benchmarks/results/train_step*.json; do not edit the file. It has one entry per model, device
kind and sequence length: the fastest result, because kernels get faster. Multi-device runs and parts of hybrids are
left out.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, writes=False)
options.parse_early(FLAGS, __name__)

import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from seqjax.command_line import run_command
from seqjax.files import write_json
from seqjax.training.dry_run import SPEEDS

RESULTS = Path(__file__).parent / "results"
MODEL = ("params", "flops_per_token")


def speeds() -> list[dict[str, Any]]:
    """Return the file's entries, sorted by source file and result name."""
    fastest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("train_step*.json")):
        recorded = report.load(path)
        settings = {key: recorded["settings"][key] for key in ("size", "seq_len", "batch", "remat")}
        of_file = {"file": f"benchmarks/results/{path.name}", "device": recorded["machine"]["device"], **settings}
        for name, result in recorded["results"].items():
            if (
                result.get("devices", 1) != 1
                or result.get("share", 1) != 1
                or any(key not in result for key in (*MODEL, "tokens_per_s"))
            ):
                continue
            entry = {**of_file, "name": name, **{key: result[key] for key in (*MODEL, "tokens_per_s")}}
            same = tuple(entry[key] for key in ("device", "size", "seq_len", "name", *MODEL))
            if same not in fastest or entry["tokens_per_s"] > fastest[same]["tokens_per_s"]:
                fastest[same] = entry
    return sorted(fastest.values(), key=lambda entry: (entry["file"], entry["name"]))


def main(argv: list[str]) -> None:
    """Write the file."""
    FLAGS.parse_args(argv)
    write_json(SPEEDS, {"speeds": speeds()})


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
