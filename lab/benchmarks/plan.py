"""Estimate run times on other machines from measured speeds.

    python -m lab.benchmarks.plan [--record=train_step_1b3_4_devices.json] [--tokens=1e11]

The script takes each model's tokens/s per device from a record of `benchmarks.train_step`, at its largest number of
devices. It prints hours and device hours for eight devices of the same kind. Rows for other devices are scaled by peak
dense bf16 throughput and marked as estimates: they assume the same utilisation and an equally good network. TPUs have
rows only for models with kernels that run on TPUs.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, writes=False)
FLAGS.add_argument("--record", default="train_step_1b3_4_devices.json", help="a file in benchmarks/results")
FLAGS.add_argument("--tokens", type=float, default=1e11, help="of the run (1e11)")
options.parse_early(FLAGS, __name__)

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from seqjax.command_line import run_command
from seqjax.errors import UserError
from seqjax.models.flops import PEAK_TFLOPS

RESULTS = Path(__file__).parents[2] / options.RECORDED
ON_TPU = ("transformer_pp",)  # other models have a GPU kernel in the record, but would run plain XLA on a TPU


class Machine(NamedTuple):
    """Several devices of a kind listed in `PEAK_TFLOPS`."""

    name: str
    kind: str
    count: int


MACHINES = (
    Machine("8 H200", "H200", 8),
    Machine("8 A100", "A100", 8),
    Machine("TPU v5e-64", "TPU v5 lite", 64),
)


def rows(record: dict[str, Any], tokens: float) -> Iterator[str]:
    """Yield table rows: model, machine, tokens/s, hours, device hours, and whether measured or estimated."""
    device, results = record["machine"]["device"], record["results"]
    measured = next(kind for kind in PEAK_TFLOPS if kind in device)
    most = max(result["devices"] for result in results.values())
    for machine in MACHINES:
        for name, result in results.items():
            model = name.split(":")[0].split(" ")[0]
            if result["devices"] != most or (machine.kind.startswith("TPU") and model not in ON_TPU):
                continue
            scale = PEAK_TFLOPS[machine.kind] / PEAK_TFLOPS[measured]
            rate = result["tokens_per_s"] / most * machine.count * scale
            hours = tokens / rate / 3600
            how = f"{most} measured, times {machine.count / most:g}"
            if machine.kind != measured:
                how = f"estimate by peak, {PEAK_TFLOPS[machine.kind]:g} of {PEAK_TFLOPS[measured]:g} TFLOP/s"
            times = f"{rate / 1000:,.0f} | {hours:,.0f} | {hours * machine.count:,.0f}"
            yield f"| {machine.name} | {model} | {times} | {how} |"


def main(argv: list[str]) -> None:
    """Print the table."""
    args = FLAGS.parse_args(argv)
    path = RESULTS / args.record
    if not path.is_file():
        names = ", ".join(sorted(file.name for file in RESULTS.glob("train_step*.json")))
        raise UserError(f"--record={args.record} is not in benchmarks/results. Available: {names}.")
    sys.stdout.write(
        "| devices | model | thousand tokens/s | hours | device hours | from |\n|---|---|---:|---:|---:|---|\n"
    )
    for row in rows(json.loads(path.read_text(encoding="utf-8")), args.tokens):
        sys.stdout.write(row + "\n")


if __name__ == "__main__":
    run_command(main)
